"""Small bases of a merge as files, whole and quantised, and what a merge should make of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from quantised import dequantised_mxfp4
from safetensors.torch import save_file

from lora_moe_rl.adapters.families import ModelShape, hf_path
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import AdapterConfig
from lora_moe_rl.export.merged_weights import Form
from lora_moe_rl.files.untrusted import SafeWeights
from lora_moe_rl.kernels.merge import formats
from lora_moe_rl.kernels.merge.rounding import Arrived

ADAPTER = AdapterConfig(rank=4, expert_rank=3, alpha=5.0, expert_alpha=2.0)


INDEX = "model.safetensors.index.json"


def spec_of(base: Path, adapter: AdapterConfig = ADAPTER) -> AdapterSpec:
    shape = ModelShape.from_hf_config(json.loads((base / "config.json").read_text()))
    if not shape.num_experts:
        adapter = AdapterConfig(rank=adapter.rank, alpha=adapter.alpha)
    return AdapterSpec.build(shape, adapter)


def random_adapter(spec: AdapterSpec, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (0.1 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in spec.tensor_shapes.items()
    }


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    with SafeWeights.open(folder) as weights:
        return {name: weights.read(name) for name in weights.file_of}


def shards_of(base: dict[str, torch.Tensor], config: dict, folder: Path, sizes: int) -> Path:
    """A directory with an index, `sizes` tensors in a shard."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(base)
    weight_map = {}
    for number, first in enumerate(range(0, len(names), sizes)):
        some, file = names[first : first + sizes], f"model-{number}.safetensors"
        save_file({name: base[name].contiguous() for name in some}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(some, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def expected_weights(spec, tensors, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`{path: W + scale * B A}` in float64 of every adapted linear; `base` per expert, by path."""
    result = {}
    for site in spec:
        path = f"model.layers.{site.layer}.{hf_path(spec.shape, site.module)}"
        A, B = (torch.from_numpy(tensors[f"{site.name}.{m}"]).double() for m in "AB")
        for expert in range(site.num_experts or 1):
            of_expert = [
                x if site.num_experts is None or site.shared == m else x[expert]
                for m, x in (("A", A), ("B", B))
            ]
            name = path.format(expert)
            delta = site.scale * (of_expert[1] @ of_expert[0])
            result[name] = base[f"{name}.weight"].double() + delta
    return result


def quantise(weights: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """Linears of layers and experts as `form`; what is left becomes bfloat16."""
    result = {}
    for name, value in weights.items():
        path, _, last = name.rpartition(".")
        linear = value.dim() == 2 and "_proj" in name
        if not linear or last != "weight":
            keep = name.endswith("e_score_correction_bias")
            result[name] = value if keep else value.to(torch.bfloat16)
        elif form == "fp8":
            result[name], result[f"{path}.weight_scale_inv"] = formats.quantise_fp8(value)
        elif form == "mxfp4":
            packed, scale = formats.quantise_mxfp4(value.float())
            result[f"{path}.weight_packed"], result[f"{path}.weight_scale"] = packed, scale
        else:
            packed, scale = formats.quantise_int4(value, torch.bfloat16)
            result[f"{path}.weight_packed"], result[f"{path}.weight_scale"] = packed, scale
            result[f"{path}.weight_shape"] = torch.tensor(value.shape)
    return result


def dequantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    result = {}
    for name, value in tensors.items():
        path = name.rpartition(".")[0]
        if f"{path}.weight_scale_inv" in tensors and name.endswith(".weight"):
            scale = tensors[f"{path}.weight_scale_inv"]
            result[name] = formats.dequantise_fp8(value, scale, torch.float64)
        elif name.endswith("weight_packed"):
            scale = tensors[f"{path}.weight_scale"]
            if scale.dtype == torch.uint8:
                result[f"{path}.weight"] = dequantised_mxfp4(value, scale).double()
                continue
            result[f"{path}.weight"] = formats.dequantise_int4(value, scale, torch.float64)
        elif not name.endswith(("weight_scale_inv", "weight_scale", "weight_shape")):
            result[name] = value
    return result


WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": 32}


CONFIGS = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": WEIGHTS}},
    },
    "mxfp4": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": WEIGHTS | {"type": "float"}}},
    },
}


DENSE = AdapterConfig(rank=4, targets=("q_b_proj", "mlp.*", "experts.gate", "shared_expert.down"))


def check_told(told: Arrived, before, expected, found) -> None:
    """What is said of a tensor, against its float64 values."""
    error, change, got = found - expected, expected - before, found - before
    assert told.relative == pytest.approx(float(error.norm() / expected.norm()), rel=1e-3)
    assert told.error_over_change == pytest.approx(float(error.norm() / change.norm()), rel=1e-3)
    product = float((got * change).sum())
    assert told.cosine == pytest.approx(product / float(got.norm() * change.norm()), abs=1e-3)
    assert told.lost == pytest.approx(abs(1 - product / float(change.square().sum())), abs=1e-3)


def looks_whole(folder: Path) -> bool:
    return (folder / "config.json").exists() or (folder / INDEX).exists()


STOCHASTIC = Form(rounding="stochastic")
