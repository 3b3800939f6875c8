"""Safetensors files that are written tensor by tensor, beside those of the safetensors package."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_moe_rl.files.saving import save_safetensors, stream_safetensors
from lora_moe_rl.files.untrusted import SafeFile

DRAW = np.random.default_rng(0)
FLOATS = {
    "layers.10.B": DRAW.standard_normal((3, 4, 2)).astype(np.float32),
    "layers.2.A": DRAW.standard_normal((5, 7)).astype(np.float32).T,  # not as it lies in memory
    "é": np.zeros((0, 3), np.float32),
    "layers.1.A": np.float32([np.nan, -0.0, np.inf]),
}
MIXED = FLOATS | {"began|layers.2.o_proj|0": np.array([7]), "a": np.arange(3)}


@pytest.mark.parametrize("tensors", [MIXED, FLOATS, {}], ids=["mixed", "floats", "none"])
def test_what_is_saved_is_the_packages_file_and_its_sum(tensors, tmp_path):
    found = save_safetensors(tmp_path / "ours", tensors)
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, tmp_path / "theirs")
    data = (tmp_path / "ours").read_bytes()
    assert data == (tmp_path / "theirs").read_bytes()
    assert (found.size, found.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert set(SafeFile.open(tmp_path / "ours").entries) == set(tensors)


def stream(path, tensors, metadata=lambda: {"format": "pt"}) -> None:
    shapes = {name: FLOATS[name].shape for name in FLOATS}
    stream_safetensors(path, shapes, tensors, metadata)


def test_a_stream_is_the_packages_file_too_and_says_at_its_end_what_is_known_then(tmp_path):
    seen: list[str] = []

    def arrays():
        for name, values in sorted(FLOATS.items()):
            seen.append(name)
            yield name, values

    stream(tmp_path / "ours", arrays(), lambda: {"sum": f"{len(seen):08d}"})
    plain = {name: np.ascontiguousarray(values) for name, values in FLOATS.items()}
    save_file(plain, tmp_path / "theirs", {"sum": "00000004"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    for name, values in load_file(tmp_path / "ours").items():
        np.testing.assert_array_equal(values, FLOATS[name])


def test_tensors_out_of_turn_too_few_too_many_and_of_other_shapes_are_refused(tmp_path):
    ordered = sorted(FLOATS.items())
    wrong = [(name, values[..., :1]) for name, values in ordered]
    double = [(name, values.astype(np.float64)) for name, values in ordered]
    for tensors in (FLOATS.items(), ordered[:-1], [*ordered, ordered[-1]], wrong, double):
        with pytest.raises(ValueError):
            stream(tmp_path / "x", iter(tensors))


def test_a_header_that_became_longer_is_refused(tmp_path):
    texts = iter(["", "x" * 100])
    with pytest.raises(ValueError, match="has become longer"):
        stream(tmp_path / "x", sorted(FLOATS.items()), lambda: {"text": next(texts)})
