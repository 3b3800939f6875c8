"""Quantised tiny models, and the same weights as plain numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lora_moe_rl.kernels.dequant import Form
from lora_moe_rl.tiny import shapes
from lora_moe_rl.tiny.quantise import quantise
from lora_moe_rl.tiny.tokenizer import make_tokenizer

# What vLLM cuts and merges FP8 linears of: whole blocks of 128.
FP8_SIZES = {
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 128},
    "deepseek_v3": {
        "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128,
        "q_lora_rank": 128,
    },
}  # fmt: skip


def save_model(name: str, folder: Path, form: Form, **sizes: int) -> None:
    """A tiny model with random weights, of sizes that `form` can quantise."""
    sizes = (FP8_SIZES[name] if form == "fp8" else {}) | sizes
    config = AutoConfig.for_model(name, **shapes.SHAPES[name] | sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    if name == "deepseek_v3":
        shapes.draw_biases(model)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | shapes.EXTRA_CONFIG[name]))


def make_pair(name: str, folder: Path, form: Form = "int4", **sizes: int) -> tuple[Path, Path]:
    """(quantised, dequantised) directories of a tiny model. The second is made by
    compressed-tensors and by transformers."""
    base, packed, plain = folder / "base", folder / "packed", folder / "plain"
    save_model(name, base, form, **sizes)
    quantise(base, packed, form)
    shutil.copytree(base, plain)
    save_file(dequantised(load_file(packed / "model.safetensors")), plain / "model.safetensors")
    return packed, plain


def dequantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In float32, exactly."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    result = {}
    for name, value in tensors.items():
        path, _, last = name.rpartition(".")
        if last == "weight_packed" and value.dtype == torch.uint8:
            result[f"{path}.weight"] = dequantised_mxfp4(value, tensors[f"{path}.weight_scale"])
        elif last == "weight_packed":
            shape = torch.Size(tensors[f"{path}.weight_shape"].tolist())
            scale = tensors[f"{path}.weight_scale"].float()
            q = unpack_from_int32(value, 4, shape)
            result[f"{path}.weight"] = dequantize(q, scale, dtype=torch.float32)
        elif f"{name}_scale_inv" in tensors:
            result[name] = _fp8(value, tensors[f"{name}_scale_inv"])
        elif last not in ("weight_scale", "weight_shape", "weight_scale_inv"):
            result[name] = value
    return result


def dequantised_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """By compressed-tensors, in float32."""
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    out, half = packed.shape
    values = unpack_fp4_from_uint8(packed, out, 2 * half, dtype=torch.float32)
    return dequantize(values, decompress_mx_scale(scale).float(), dtype=torch.float32)


def _fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """transformers takes whole blocks alone."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    out, in_features = weight.shape
    whole = torch.zeros(128 * scale.shape[0], 128 * scale.shape[1]).to(weight.dtype)
    whole[:out, :in_features] = weight
    numbers = Fp8Dequantize(None)._dequantize_one(whole, scale, torch.float32)
    return numbers[:out, :in_features].clone()


def edit(folder: Path, **tensors) -> None:
    """Changes tensors of a directory: `{name: function of the tensor, or None to drop it}`."""
    path = folder / "model.safetensors"
    held = load_file(path)
    for name, change in tensors.items():
        value = held.pop(name)
        if change is not None:
            held[name] = change(value)
    save_file(held, path, metadata={"format": "pt"})
