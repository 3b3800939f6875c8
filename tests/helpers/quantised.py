"""Quantised tiny models, and the same weights as plain numbers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from lora_moe_rl.tiny.quantise import quantise


def make_pair(base: Path, folder: Path) -> tuple[Path, Path]:
    """(quantised, dequantised) directories of the model in `base`. The second is made by
    compressed-tensors."""
    packed, plain = folder / "packed", folder / "plain"
    folder.mkdir(parents=True, exist_ok=True)
    quantise(base, packed)
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
        if last == "weight_packed":
            shape = torch.Size(tensors[f"{path}.weight_shape"].tolist())
            scale = tensors[f"{path}.weight_scale"].float()
            q = unpack_from_int32(value, 4, shape)
            result[f"{path}.weight"] = dequantize(q, scale, dtype=torch.float32)
        elif last not in ("weight_scale", "weight_shape"):
            result[name] = value
    return result


def edit(folder: Path, **tensors) -> None:
    """Changes tensors of a directory: `{name: function of the tensor, or None to drop it}`."""
    path = folder / "model.safetensors"
    held = load_file(path)
    for name, change in tensors.items():
        value = held.pop(name)
        if change is not None:
            held[name] = change(value)
    save_file(held, path, metadata={"format": "pt"})


def set_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
