"""What is held of a checkpoint, against its tensors laid out by hand."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from mapped_files import Files
from plain_checkpoint import EXPERTS, HIDDEN, LAYERS, VOCABULARY, WIDTH, save_plain
from quantised import make_pair
from safetensors.torch import load_file, save_file

from lora_moe_rl.base.held import Held
from lora_moe_rl.base.owner import owned
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.refit.merged_base import Base


@pytest.fixture
def model(tmp_path) -> Path:
    return save_plain(tmp_path / "model")


def held(folder: str, model: Path, **changes) -> Held:
    settings = {"dtype": "float32", "tp": 1, "ep": False, "lora": True} | changes
    return Held(folder, str(model), **settings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_experts_are_laid_out_as_both_sides_hold_them(model, tmp_path, pieces, dtype):
    found = load_file(model / "model.safetensors")
    with owned(str(tmp_path)) as folder:
        store = held(folder, model, tp=pieces, dtype=dtype).open()
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                gate, up, down = (
                    found[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"].to(
                        getattr(torch, dtype)
                    )
                    for name in ("gate", "up", "down")
                )
                path = f"model.layers.{layer}.mlp.experts.routed_experts"
                w13, w2 = store[f"{path}.w13_weight"], store[f"{path}.w2_weight"]
                for rank in range(pieces):
                    mine = slice(rank * WIDTH // pieces, (rank + 1) * WIDTH // pieces)
                    expected = torch.cat([gate[mine], up[mine]])
                    assert torch.equal(w13[rank, expert], expected)
                    assert torch.equal(w2[rank, expert], down[:, mine])


@pytest.mark.parametrize("tp", [1, 2])
def test_linears_and_vocabulary_are_rows_of_one_rank_after_the_other(model, tmp_path, tp):
    found = load_file(model / "model.safetensors")
    with owned(str(tmp_path)) as folder:
        store = held(folder, model, tp=tp).open()
        for layer in range(LAYERS):
            path = f"model.layers.{layer}.self_attn"
            q, k, v = (found[f"{path}.{name}_proj.weight"] for name in "qkv")
            for rank, mine in enumerate(store[f"{path}.qkv_proj.weight"].chunk(tp)):
                assert torch.equal(mine, torch.cat([one.chunk(tp)[rank] for one in (q, k, v)]))
            assert torch.equal(store[f"{path}.o_proj.weight"], found[f"{path}.o_proj.weight"])
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert store[name].shape == (128, HIDDEN)
            assert torch.equal(store[name][:VOCABULARY], found[name])
            assert not store[name][VOCABULARY:].any()


def test_heads_that_several_ranks_of_an_engine_have_are_not_held(model, tmp_path):
    with owned(str(tmp_path)) as folder:
        names = set(held(folder, model, tp=4, ep=True).open().contents.tensors)
        everything = set(held(folder, model).contents(Base(str(model))).tensors)
    assert everything - names == {
        f"model.layers.{layer}.self_attn.qkv_proj.weight" for layer in range(LAYERS)
    }


@pytest.mark.parametrize("form", ["int4", "fp8", "mxfp4"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_packed_experts_are_the_checkpoints_bytes(tmp_path, pieces, form):
    packed, _ = make_pair("qwen3_moe", tmp_path, form)
    found = load_file(packed / "model.safetensors")
    suffixes = ("",) if form == "fp8" else ("_packed", "_scale")
    with owned(str(tmp_path)) as folder:
        store = held(folder, packed, tp=pieces).open()
        paths = {name.partition(".mlp.")[0] for name in found if ".mlp.experts." in name}
        for path, suffix in itertools.product(paths, suffixes):
            w13, w2 = (
                store[f"{path}.mlp.experts.routed_experts.{name}_weight{suffix}"]
                for name in ("w13", "w2")
            )
            for expert in range(w13.shape[1]):
                gate, up, down = (
                    found[f"{path}.mlp.experts.{expert}.{name}_proj.weight{suffix}"].to(w13.dtype)
                    for name in ("gate", "up", "down")
                )
                for rank in range(pieces):
                    mine = [one.chunk(pieces)[rank] for one in (gate, up)]
                    assert same(w13[rank, expert], torch.cat([one.view(w13.dtype) for one in mine]))
                    assert same(w2[rank, expert], down.chunk(pieces, dim=1)[rank])
        linears = {name for name in store.contents.tensors if "_proj." in name}
        assert bool(linears) == (form != "fp8")  # whose other linears are numbers


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int8), other.contiguous().view(torch.int8))


def test_a_model_that_has_changed_since_is_refused(model, tmp_path):
    with owned(str(tmp_path)) as folder:
        held(folder, model).open()
        tensors = {k: v + 1 for k, v in load_file(model / "model.safetensors").items()}
        save_file(tensors, model / "model.safetensors")
        with pytest.raises(HeldBaseError, match="something else: model is"):
            held(folder, model).open()


def written_over(model: Path, name: str) -> None:
    """One bit of the last value of a tensor, in place, at the times that the file had."""
    path = model / "model.safetensors"
    before, data = path.stat(), bytearray(path.read_bytes())
    _, end = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[name]["data_offsets"]
    data[8 + int.from_bytes(data[:8], "little") + end - 4] ^= 1  # float32
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "name",
    ["layers.1.mlp.experts.2.up_proj", "layers.0.self_attn.o_proj", "embed_tokens"],
)
def test_a_value_beyond_what_the_fingerprint_reads_is_seen(model, tmp_path, name, monkeypatch):
    monkeypatch.setattr("lora_moe_rl.models.fingerprint.HASHED_BYTES", 16)
    with owned(str(tmp_path)) as folder:
        held(folder, model).open()
        written_over(model, f"model.{name}.weight")
        with pytest.raises(HeldBaseError, match="the checkpoint has other values than are held"):
            held(folder, model).open()


def test_files_that_are_as_they_were_are_not_read_again(model, tmp_path, monkeypatch):
    with owned(str(tmp_path)) as folder:
        held(folder, model).open()
        monkeypatch.setattr("lora_moe_rl.files.untrusted.SafeWeights.read", None)
        store = held(folder, model).open()
        for name in store.contents.tensors:
            assert store[name].isfinite().all()


def test_the_same_values_in_other_files_are_compared_and_taken(model, tmp_path):
    with owned(str(tmp_path)) as folder:
        before = held(folder, model).open()
        copy = tmp_path / "copy"
        shutil.copytree(model, copy)
        (model / "model.safetensors").unlink()
        (copy / "model.safetensors").rename(model / "model.safetensors")
        store = held(folder, model).open()
        for name in store.contents.tensors:
            assert torch.equal(store[name], before[name])


def test_files_that_change_while_they_are_read_are_refused(model, tmp_path, monkeypatch):
    read = SafeWeights.read

    def while_it_changes(self, name):
        (model / "model.safetensors").touch()
        return read(self, name)

    monkeypatch.setattr(SafeWeights, "read", while_it_changes)
    with (
        owned(str(tmp_path)) as folder,
        pytest.raises(HeldBaseError, match="was changed while its base was opened"),
    ):
        held(folder, model).open()


def test_what_is_written_is_compared(model, tmp_path, monkeypatch):
    copy = torch.Tensor.copy_

    def wrongly(self, source):
        copy(self, source)
        self.flatten()[0] += 1  # where it is a view
        return self

    monkeypatch.setattr(torch.Tensor, "copy_", wrongly)
    with (
        owned(str(tmp_path)) as folder,
        pytest.raises(HeldBaseError, match="experts.0.gate_proj.* has other values"),
    ):
        held(folder, model).open()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep": True, "tp": 2}, "rollout.ep is false there and true here"),
        ({"lora": False}, "LoRA is true there and false here"),
        ({"dtype": "bfloat16"}, "dtype is float32 there and bfloat16 here"),
    ],
)
def test_another_engine_is_refused(model, tmp_path, changes, message):
    with owned(str(tmp_path)) as folder:
        held(folder, model).open()
        with pytest.raises(HeldBaseError, match=message):
            held(folder, model, **changes).open()


def test_memory_that_an_engine_shares_has_the_checkpoints_weights(model, tmp_path):
    (tmp_path / "memory").mkdir()
    port, found = Files(tmp_path / "memory"), load_file(model / "model.safetensors")
    engine = held(str(tmp_path), model, gpu=True)
    owner, mapped = engine.share(port, 0), engine.map(port)
    assert {name.rpartition(".")[2] for name in mapped.contents.tensors} == {
        "w13_weight",
        "w2_weight",
        "weight",
    }
    for layer in range(LAYERS):
        path = f"model.layers.{layer}.self_attn"
        qkv = torch.cat([found[f"{path}.{name}_proj.weight"] for name in "qkv"])
        assert torch.equal(mapped[f"{path}.qkv_proj.weight"], qkv)
    assert torch.equal(mapped["lm_head.weight"][:VOCABULARY], found["lm_head.weight"])
    for layer, expert in itertools.product(range(LAYERS), range(EXPERTS)):
        path = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (found[f"{path}.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
        w13 = mapped[f"{path}.routed_experts.w13_weight"][0, expert]
        assert torch.equal(w13, torch.cat([gate, up]))
        assert torch.equal(mapped[f"{path}.routed_experts.w2_weight"][0, expert], down)
    mapped.check()
    with pytest.raises(HeldBaseError, match="dtype is float32 there and bfloat16 here"):
        held(str(tmp_path), model, gpu=True, dtype="bfloat16").map(port)
    owner.close()
