"""Safetensors and JSON that must not be trusted."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lora_moe_rl.errors import FileError
from lora_moe_rl.files.untrusted import DTYPES, SafeFile, SafeWeights, inside, read_json

TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b.weight": torch.arange(6).view(2, 3).to(torch.bfloat16),
    "c.empty": torch.empty(0, 5),
    "d.scalar": torch.tensor(3.5),
    "e.fp8": torch.arange(8.0).to(torch.float8_e4m3fn),
}


@pytest.fixture
def model(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def rewrite(path, change) -> None:
    """The file with `change` applied to its header; the data stays."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    text = (text if isinstance(text, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_reads_what_safetensors_wrote(model):
    with SafeWeights.open(model) as weights:
        assert weights.file_of.keys() == TENSORS.keys()
        assert weights.files["model.safetensors"].metadata == {"format": "pt"}
        for name, expected in TENSORS.items():
            read = weights.read(name)
            assert read.dtype == expected.dtype and read.shape == expected.shape
            assert torch.equal(read.float(), expected.float())
        with pytest.raises(FileError, match="no tensor x"):
            weights.read("x")


def test_every_dtype_has_the_size_of_torchs():
    for size, name in DTYPES.values():
        assert getattr(torch, name).itemsize == size


def set_field(key, value):
    return lambda header: header["a.weight"].__setitem__(key, value)


HEADERS = {
    "not JSON": (lambda h: "{" + json.dumps(h), "damaged"),
    "no object": (lambda h: json.dumps([h]), "no JSON object"),
    "more than the data": (set_field("data_offsets", [0, 4800]), "takes 48 bytes"),
    "shape of more": (set_field("shape", [300, 4]), "takes 4,800 bytes"),
    "another dtype": (set_field("dtype", "F64"), "takes 96 bytes"),
    "unknown dtype": (set_field("dtype", "PICKLE"), "'PICKLE', which is none of"),
    "negative": (set_field("data_offsets", [-48, 0]), "offsets"),
    "empty and huge": (set_field("shape", [0, 2**63]), r"shape \[0, 9223372036854775808\]"),
    "empty and huge together": (set_field("shape", [0, 2**40, 2**40]), "has shape"),
    "many dimensions": (set_field("shape", [1] * 70), "has shape"),
    "boolean size": (set_field("shape", [True, 12]), "shape"),
    "no shape": (lambda h: h["a.weight"].pop("shape"), "shape None"),
    "overlap": (
        lambda h: h["d.scalar"].__setitem__("data_offsets", [0, 4]),
        "starts at byte",
    ),
    "duplicate": (
        lambda h: json.dumps(h)[:-1] + ', "a.weight": ' + json.dumps(h["a.weight"]) + "}",
        "'a.weight' twice",
    ),
    "a tensor left out": (lambda h: h.pop("e.fp8"), "holds what nothing names"),
    "metadata": (lambda h: h.__setitem__("__metadata__", {"a": 1}), "__metadata__"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_header_is_refused(model, case):
    change, message = HEADERS[case]
    rewrite(model / "model.safetensors", change)
    with pytest.raises(FileError, match=message) as error:
        SafeWeights.open(model)
    assert "model.safetensors" in str(error.value)


@pytest.mark.parametrize("left", [0, 7, 20, -1, -40])
def test_a_truncated_file_is_refused(model, left):
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(FileError, match="truncated|claims"):
        SafeFile.open(path)


def test_a_header_longer_than_the_file_is_not_read(model):
    path = model / "model.safetensors"
    path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(FileError, match="truncated"):
        SafeFile.open(path)


def test_a_file_that_becomes_shorter_is_noticed(model):
    file = SafeFile.open(model / "model.safetensors")
    os.truncate(file.path, 100)
    with pytest.raises(FileError, match="shorter"):
        file.read("e.fp8")
    file.close()


def shards(folder, weight_map) -> None:
    save_file({"x": torch.ones(2)}, folder / "1.safetensors")
    save_file({"y": torch.ones(3)}, folder / "2.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


GOOD = {"x": "1.safetensors", "y": "2.safetensors"}


def test_shards_are_found_by_their_index(tmp_path):
    shards(tmp_path, GOOD)
    with SafeWeights.open(tmp_path) as weights:
        assert [entry.name for entry in weights.entries()] == ["x", "y"]
        assert weights.entry("y").shape == (3,)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (GOOD | {"x": "../1.safetensors"}, "no name of a file in its own directory"),
        (GOOD | {"x": "/etc/1.safetensors"}, "no name of a file in its own directory"),
        (GOOD | {"x": "a/../1.safetensors"}, "no name of a file in its own directory"),
        (GOOD | {"x": "3.safetensors"}, "3.safetensors, which is not there"),
        (GOOD | {"x": "1.bin"}, "1.bin, which is not there"),
        (GOOD | {"x": "\ud800"}, r"\\ud800, which is not there"),
        (GOOD | {"x": "config.json"}, "only .safetensors files"),
        (GOOD | {"z": "1.safetensors"}, "z is in 1.safetensors, and it is not"),
        (GOOD | {"x": 1}, "no map"),
        ({"x": "1.safetensors"} | {"y": "1.safetensors"}, "y is in 1.safetensors, and it is not"),
        ({}, "no map"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, weight_map, message):
    shards(tmp_path, weight_map)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileError, match=message):
        SafeWeights.open(tmp_path)


def test_a_tensor_that_the_index_leaves_out_is_refused(tmp_path):
    shards(tmp_path, GOOD)
    save_file({"y": torch.ones(3), "z": torch.ones(1)}, tmp_path / "2.safetensors")
    with pytest.raises(FileError, match="holds z, which .* does not name"):
        SafeWeights.open(tmp_path)


def test_two_models_in_one_directory_are_refused(tmp_path):
    """transformers and PEFT load the one, vLLM and we the other."""
    shards(tmp_path, GOOD)
    save_file({"x": torch.zeros(2), "y": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match="model.safetensors.index.json that does not name it: .*re"):
        SafeWeights.open(tmp_path)
    for name in ("1", "2"):
        (tmp_path / f"{name}.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(GOOD, "model.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with SafeWeights.open(tmp_path) as weights:
        assert weights.read("x").tolist() == [0, 0]


def test_links_may_not_leave_the_directory(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    save_file({"x": torch.ones(2)}, outside / "real.safetensors")
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").symlink_to(outside / "real.safetensors")
    with pytest.raises(FileError, match="a link to .*outside of it"):
        SafeWeights.open(model)
    (model / "model.safetensors").unlink()
    save_file({"x": torch.ones(2)}, model / "own.safetensors")
    (model / "model.safetensors").symlink_to("own.safetensors")
    SafeWeights.open(model)


def test_a_snapshot_of_the_hub_links_to_its_own_blobs(tmp_path):
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"x": torch.ones(2)}, blobs / "123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    assert SafeWeights.open(snapshot).entry("x").shape == (2,)
    (tmp_path / "secret").write_text("s")
    (snapshot / "config.json").symlink_to("../../../secret")
    with pytest.raises(FileError, match="outside of it"):
        inside(snapshot, "config.json")


class Sentinel:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.pt", "x.pth"])
def test_pickles_are_refused_and_not_opened(tmp_path, name):
    touched = tmp_path / "touched"
    path = tmp_path / name
    path.write_bytes(pickle.dumps(Sentinel(touched)))
    os.utime(path, (1, 1))
    with pytest.raises(FileError, match=f"{name} and no model.safetensors: pickles can run code"):
        SafeWeights.open(tmp_path)
    assert not touched.exists()
    assert path.stat().st_atime == 1


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")  # opening it would wait for ever
    with pytest.raises(FileError, match="no regular file"):
        SafeWeights.open(tmp_path)
    with pytest.raises(FileError, match="no regular file"):
        read_json(tmp_path / "model.safetensors")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1, "a": 2}', "[" * 100_000, "\xff"])
def test_json_that_is_no_object_is_refused(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(FileError, match="config.json"):
        read_json(path)


def test_many_threads_read_one_file(model):
    from concurrent.futures import ThreadPoolExecutor

    file = SafeFile.open(model / "model.safetensors")
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(file.read, ["a.weight"] * 64))
    assert all(np.array_equal(one.numpy(), TENSORS["a.weight"].numpy()) for one in read)
    file.close()
