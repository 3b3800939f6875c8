"""A tiny GPT-OSS in the form of the published ones: experts in stacks of MXFP4."""

from __future__ import annotations

import json
from pathlib import Path

import tiny_families
import torch
from safetensors.torch import load_file

from lora_moe_rl.kernels.merge import formats

KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
SIZES = {"hidden_size": 96, "intermediate_size": 64}  # groups of 32, and nothing square


def make(folder: Path) -> tuple[dict[str, torch.Tensor], dict]:
    """(tensors, config), of a model that was saved to `folder` unquantised."""
    tiny_families.save("gpt_oss", folder, **SIZES)
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            codes, scales = formats.quantise_mxfp4(value.mT.contiguous())
            tensors[f"{name}_blocks"] = codes.unflatten(-1, (-1, 16))
            tensors[f"{name}_scales"] = scales
        else:
            tensors[name] = value.to(torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    said = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
    return tensors, config | {"dtype": "bfloat16", "quantization_config": said}
