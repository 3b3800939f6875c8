"""What an engine reads of the checkpoint where its base is held."""

from __future__ import annotations

import pytest
from plain_checkpoint import save_plain
from quantised import make_pair
from safetensors.torch import load_file, save_file

from lora_moe_rl.base.held import Held
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.refit.merged_base import Base

pytestmark = pytest.mark.seconds


def read_of(folder, monkeypatch) -> dict:
    """What the loader hands to vLLM; each is a tensor that was read, and no other is."""
    from lora_moe_rl.base.loader import HeldLoader

    held, base = Held("", str(folder), "float32", 1, False, True), Base(str(folder))
    loader = HeldLoader.__new__(HeldLoader)
    loader.model_dir, loader.not_read = str(folder), set(held.not_read(base))
    read, names = SafeWeights.read, []
    monkeypatch.setattr(
        SafeWeights, "read", lambda self, name: names.append(name) or read(self, name)
    )
    found = dict(loader.get_all_weights(None, None))
    assert sorted(names) == sorted(found)
    return found


def test_linears_embedding_head_and_experts_are_not_read(tmp_path, monkeypatch):
    folder = save_plain(tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    norm = tensors["lm_head.weight"][0].clone()
    bias = tensors["model.layers.0.self_attn.q_proj.weight"][:, 0].clone()
    others = {"model.norm.weight": norm, "model.layers.0.self_attn.q_proj.bias": bias}
    save_file(tensors | others, path)
    found = read_of(folder, monkeypatch)
    assert found.keys() == others.keys()
    assert found["model.norm.weight"].equal(norm)


def test_scales_of_fp8_experts_are_read_and_their_weights_are_not(tmp_path, monkeypatch):
    packed, _ = make_pair("qwen3_moe", tmp_path, "fp8")
    kinds = {
        name.partition(".experts.")[2].partition(".")[2]
        for name in read_of(packed, monkeypatch)
        if ".experts." in name
    }
    assert kinds == {f"{one}_proj.weight_scale_inv" for one in ("gate", "up", "down")}
