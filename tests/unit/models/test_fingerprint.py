"""Which base a model directory is: told by its config and by the beginnings of its tensors."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_moe_rl.errors import ModelError
from lora_moe_rl.models.fingerprint import base_record, check_unchanged, fingerprint


@pytest.fixture
def model(tmp_path):
    """Its first tensors have more than a MiB: what a merge changes stands behind them."""
    torch.manual_seed(0)
    tensors = {"embed.weight": torch.randn(600, 512)}
    for layer in range(3):
        tensors[f"layers.{layer}.q_proj.weight"] = torch.randn(32, 16)
        for expert in range(4):
            tensors[f"layers.{layer}.experts.{expert}.up.weight"] = torch.randn(8, 16)
    (tmp_path / "config.json").write_text(json.dumps({"layers": 3}))
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    "name", ["embed.weight", "layers.1.q_proj.weight", "layers.2.experts.3.up.weight"]
)
def test_a_merge_into_any_linear_makes_another_base(model, name):
    record = base_record("me/model", model)
    check_unchanged(record, model)
    tensors = load_file(model / "model.safetensors")
    tensors[name] = tensors[name] + 1e-3 * torch.randn(len(tensors[name]), 1) @ torch.randn(
        1, tensors[name].shape[1]
    )
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(ModelError, match="its weight files are others than when the run was made"):
        check_unchanged(record, model)


def test_what_is_no_weight_file_has_a_fingerprint_too(model):
    before = fingerprint(model)
    for content in (b"", b"\x05", (8).to_bytes(8, "little") + b'{"a": 1}', b"\xff" * 64):
        (model / "more.safetensors").write_bytes(content)
        assert re.fullmatch("[0-9a-f]{64}", fingerprint(model)) and fingerprint(model) != before
