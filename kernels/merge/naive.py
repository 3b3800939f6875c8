"""The readable reference of the merges, in float64 up to the one rounding of the result."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_moe_rl.kernels.merge import formats


def merged(W: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """`W + scale * B A` in float64."""
    return W.double() + scale * (B.double() @ A.double())


def merge_delta(W: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    return merged(W, A, B, scale).to(W.dtype)


def merge_delta_fp8(W, scale_inv, A, B, scale) -> tuple[Tensor, Tensor]:
    value = formats.dequantise_fp8(W, scale_inv, torch.float64)
    return formats.quantise_fp8(merged(value, A, B, scale))


def merge_delta_int4(packed, scales, A, B, scale) -> tuple[Tensor, Tensor]:
    value = formats.dequantise_int4(packed, scales, torch.float64)
    return formats.quantise_int4(merged(value, A, B, scale), scales.dtype)
