"""What rounding leaves of an adapter's change."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from merge_bases import (
    check_told,
    expected_weights,
    looks_whole,
    read_all,
    shards_of,
    spec_of,
)

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.errors import ExportError
from lora_moe_rl.export import merged_plan
from lora_moe_rl.export.merged import export_merged
from lora_moe_rl.export.merged_weights import Form
from lora_moe_rl.verify import hf


def change_of(spec: AdapterSpec, ratio: float) -> dict[str, np.ndarray]:
    """An adapter whose change is about `ratio` times the weights of `plain`, which are of 0.1."""
    rng = np.random.default_rng(3)
    tensors = {}
    for site in spec:
        size = {"A": 1.0, "B": 0.1 * ratio / (site.scale * site.rank**0.5)}
        for matrix, shape in (("A", site.shape_A), ("B", site.shape_B)):
            tensors[f"{site.name}.{matrix}"] = (size[matrix] * rng.standard_normal(shape)).astype(
                np.float32
            )
    return tensors


@pytest.fixture(scope="module")
def half(plain, tmp_path_factory):
    """(a bfloat16 base of several shards, its tensors, its spec)."""
    _, weights, config = plain
    base = {name: value.bfloat16() for name, value in weights.items()}
    folder = shards_of(base, config, tmp_path_factory.mktemp("half") / "base", 9)
    return folder, base, spec_of(folder)


def test_what_bfloat16_loses_is_told(half, tmp_path):
    folder, base, spec = half
    tensors = change_of(spec, 1e-3)
    report = export_merged(spec, tensors, folder, tmp_path / "out")
    found, expected = read_all(tmp_path / "out"), expected_weights(spec, tensors, base)
    assert report.arrived.keys() == {f"{path}.weight" for path in expected}
    for path, value in expected.items():
        name = f"{path}.weight"
        check_told(report.arrived[name], base[name].double(), value, found[name].double())
    assert 0.3 < report.total.lost < 0.6 and 0.5 < report.total.cosine < 0.8
    written = json.loads((tmp_path / "out/merge.json").read_text())["rounding"]["all"]
    assert written["lost"] == report.total.lost and written["cosine"] == report.total.cosine


def test_stochastic_rounding_loses_nothing_in_the_mean_and_repeats_itself(
    half, tmp_path, monkeypatch
):
    folder, _, spec = half
    tensors = change_of(spec, 1e-3)
    written = {}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        form = Form(rounding="stochastic", seed=seed)
        report = export_merged(spec, tensors, folder, tmp_path / name, form)
        assert report.total.lost < 0.03  # of 200,000 elements
        written[name] = read_all(tmp_path / name)
    monkeypatch.setattr(merged_plan, "STEP_NUMBERS", 10**9)  # a whole matrix a step
    export_merged(spec, tensors, folder, tmp_path / "whole", Form(None, False, "stochastic"))
    written["whole"] = read_all(tmp_path / "whole")
    for name, value in written["one"].items():
        assert torch.equal(written["again"][name], value), name
        assert torch.equal(written["whole"][name], value), name
    assert any(not torch.equal(written["other"][n], v) for n, v in written["one"].items())


def test_what_is_adapted_in_float32_loses_nothing(half, tmp_path):
    folder, base, spec = half
    tensors = change_of(spec, 2e-5)
    report = export_merged(spec, tensors, folder, tmp_path / "out", Form(adapted_float32=True))
    assert report.total.lost < 1e-3 and report.total.cosine > 0.999
    found, expected = read_all(tmp_path / "out"), expected_weights(spec, tensors, base)
    for name, value in found.items():
        exact = expected.get(name.removesuffix(".weight"))
        if exact is None:
            assert torch.equal(value, base[name]), name
        else:
            assert value.dtype == torch.float32
            torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-9)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "float32" in (config.get("dtype"), config.get("torch_dtype"))
    loaded = hf.load(tmp_path / "out").state_dict()["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(loaded, found["model.layers.0.self_attn.o_proj.weight"])


def test_a_merge_that_loses_too_much_does_not_load_and_goes_on_with_another_bound(half, tmp_path):
    folder, _, spec = half
    tensors, out = change_of(spec, 2e-5), tmp_path / "out"
    with pytest.raises(ExportError, match=r"out is not finished: 9\d.\d% of the change lost"):
        export_merged(spec, tensors, folder, out, stop_lost=0.9)
    assert not looks_whole(out)
    report = export_merged(spec, tensors, folder, out, stop_lost=0.99)
    assert report.kept_shards == report.shards and looks_whole(out)
    assert 0.9 < report.total.lost < 0.99
