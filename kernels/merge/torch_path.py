"""The merges in plain torch, one expert at a time so that a float32 copy of one is all that is
added to memory. W is `[E, out, in]`, A `[E, r, in]`, B `[E, out, r]`."""

from __future__ import annotations

import torch
from torch import Tensor

from lora_moe_rl.kernels.merge import formats


def merge_delta(out: Tensor, W: Tensor, A: Tensor, B: Tensor, scale: float) -> None:
    for target, W_e, A_e, B_e in zip(out, W, A, B, strict=True):
        if target.dtype == torch.float32:  # no copy: the sum is made where it stays
            value = target if target.data_ptr() == W_e.data_ptr() else target.copy_(W_e)
            _add(value, A_e, B_e, scale)
        else:
            target.copy_(_add(W_e.float(), A_e, B_e, scale))


def merge_delta_fp8(W: Tensor, scale_inv: Tensor, A: Tensor, B: Tensor, scale: float) -> None:
    for W_e, scale_inv_e, A_e, B_e in zip(W, scale_inv, A, B, strict=True):
        value = _add(formats.dequantise_fp8(W_e, scale_inv_e), A_e, B_e, scale)
        weight, new_scale = formats.quantise_fp8(value)
        W_e.copy_(weight)
        scale_inv_e.copy_(new_scale)


def merge_delta_int4(packed: Tensor, scales: Tensor, A: Tensor, B: Tensor, scale: float) -> None:
    for packed_e, scales_e, A_e, B_e in zip(packed, scales, A, B, strict=True):
        value = _add(formats.dequantise_int4(packed_e, scales_e), A_e, B_e, scale)
        words, new_scales = formats.quantise_int4(value, scales.dtype)
        packed_e.copy_(words)
        scales_e.copy_(new_scales)


def _add(value: Tensor, A: Tensor, B: Tensor, scale: float) -> Tensor:
    """value += scale * B A, float32."""
    return value.addmm_(B.float(), A.float(), alpha=scale)
