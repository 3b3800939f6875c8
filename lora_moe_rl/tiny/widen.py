"""A tiny model as the same function of wider matrices, which FP8's blocks of 128 x 128 fit.

vLLM fuses q, k and v, and gate and up, and wants whole blocks of each. Here MLPs and experts get
columns of zeros; key/value heads, and what MLA compresses queries to, are repeated. The hidden size
stays, so that a last block is not whole.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from lora_moe_rl.files.untrusted import SafeWeights, read_json
from lora_moe_rl.kernels.dequant.formats import FP8_BLOCK

WIDTHS = ("intermediate_size", "moe_intermediate_size")


def widen(source: Path, out: Path) -> None:
    """Writes the model of the directory `source` to the directory `out`."""
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("model*.safetensors*"))
    config = read_json(source / "config.json")
    with SafeWeights.open(source) as weights:
        tensors = {
            name: _widened(name, weights.read(name), config).contiguous()
            for name in weights.file_of
        }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | _sizes(config), indent=2) + "\n")


def _sizes(config: dict[str, Any]) -> dict[str, int]:
    sizes = {name: config[name] + -config[name] % FP8_BLOCK for name in WIDTHS}
    if "q_lora_rank" in config:
        return sizes | {"q_lora_rank": config["q_lora_rank"] * _times(config["q_lora_rank"])}
    heads = config["num_key_value_heads"]
    return sizes | {"num_key_value_heads": heads * _times(heads * config["head_dim"])}


def _times(rows: int) -> int:
    """How often so many rows are repeated. Raises ValueError when that makes no whole blocks."""
    if FP8_BLOCK % rows and rows % FP8_BLOCK:
        raise ValueError(f"{rows} rows repeated make no whole blocks of {FP8_BLOCK}")
    return max(FP8_BLOCK // rows, 1)


def _widened(name: str, weight: Tensor, config: dict[str, Any]) -> Tensor:
    if re.search(r"\.(gate|up)_proj\.weight$", name):
        return pad(weight, (0, 0, 0, -weight.shape[0] % FP8_BLOCK))
    if name.endswith(".down_proj.weight"):
        return pad(weight, (0, -weight.shape[1] % FP8_BLOCK))
    if re.search(r"\.[kv]_proj\.weight$", name):
        heads = weight.unflatten(0, (-1, config["head_dim"]))
        return heads.repeat_interleave(_times(weight.shape[0]), dim=0).flatten(0, 1)
    if re.search(r"\.q_a_(proj|layernorm)\.weight$", name):
        return torch.cat([weight] * _times(weight.shape[0]))
    if name.endswith(".q_b_proj.weight"):
        times = _times(weight.shape[1])
        return torch.cat([weight / times] * times, dim=1)
    return weight
