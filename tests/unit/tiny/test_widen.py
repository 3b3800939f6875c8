"""A tiny model made wider for FP8 is the same function."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open

from lora_moe_rl.tiny import shapes
from lora_moe_rl.tiny.make import TINY_NAMES
from lora_moe_rl.tiny.quantise import quantise
from lora_moe_rl.tiny.widen import widen
from lora_moe_rl.verify.hf_load import load


def saved(name, folder):
    torch.manual_seed(0)
    shapes.build_model(name).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | shapes.EXTRA_CONFIG[name]))
    return folder


@pytest.mark.parametrize("name", TINY_NAMES)
@torch.no_grad()
def test_the_function_stays(name, tmp_path):
    widen(saved(name, tmp_path / "source"), tmp_path / "wide")
    ids = torch.arange(60).view(2, 30) + 30
    narrow, wide = (load(tmp_path / folder)(ids).logits for folder in ("source", "wide"))
    assert (wide - narrow).abs().max() < 1e-5 < narrow.abs().max()


@pytest.mark.parametrize("name", TINY_NAMES)
def test_what_is_fused_has_whole_blocks(name, tmp_path):
    widen(saved(name, tmp_path / "source"), tmp_path / "wide")
    quantise(tmp_path / "wide", tmp_path / "fp8", "fp8")
    fused = ("q_proj", "k_proj", "v_proj", "q_a_proj", "gate_proj", "up_proj")
    with safe_open(tmp_path / "fp8" / "model.safetensors", "pt") as file:
        rows = {
            key: file.get_slice(key).get_shape()[0]
            for key in file.keys()  # noqa: SIM118  it is no dict
            if key.removesuffix(".weight").endswith(fused)
        }
        dtypes = {file.get_slice(key).get_dtype() for key in rows}
    assert dtypes == {"F8_E4M3"} and not any(number % 128 for number in rows.values())
