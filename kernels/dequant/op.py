"""Dequantisation as a call. There are no gradients: a quantised weight is frozen."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_moe_rl.kernels import backend
from lora_moe_rl.kernels.dequant import torch_path
from lora_moe_rl.kernels.dequant.formats import Packed

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def dequantise(packed: Packed, dtype: torch.dtype, kernel: str = "auto") -> Tensor:
    """The weight, in memory of its own."""
    out = torch.empty(packed.shape, dtype=dtype, device=packed.data.device)
    return dequantise_(packed, out, kernel)


@torch.no_grad()
def dequantise_(packed: Packed, out: Tensor, kernel: str = "auto") -> Tensor:
    """Into `out`, contiguous and of the weight's shape, which is returned. `kernel`: auto, triton
    or torch. Raises ValueError for an `out` that does not fit."""
    if tuple(out.shape) != packed.shape or out.dtype not in DTYPES or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {tuple(out.shape)} with strides {out.stride()}; a weight of shape "
            f"{packed.shape} needs a contiguous tensor of a float dtype"
        )
    tensors = (packed.data, packed.scales, out)
    if out.dim() == 2:
        tensors = tuple(tensor[None] for tensor in tensors)
    getattr(_path(backend.resolve(kernel, out.device)), packed.form)(*tensors)
    return out


def _path(kernel: str):
    if kernel == "torch":
        return torch_path
    from lora_moe_rl.kernels.dequant import triton_path  # Triton is not on every machine

    return triton_path
