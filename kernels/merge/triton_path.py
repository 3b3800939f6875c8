"""Launches of the Triton merges. W is `[E, out, in]`, A `[E, r, in]`, B `[E, out, r]`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from lora_moe_rl.kernels.backend import interpreting
from lora_moe_rl.kernels.merge import triton_kernels as kernels
from lora_moe_rl.kernels.merge.formats import FP8_BLOCK

_BLOCK_O, _BLOCK_I, _MOST_R = 64, 128, 32
_INT4_BLOCK_O = 32


def merge_delta(out: Tensor, W: Tensor, A: Tensor, B: Tensor, scale: float) -> None:
    blocks = {"BLOCK_O": _BLOCK_O, "BLOCK_I": _BLOCK_I}
    _launch(kernels.merge_delta, (out, W), W.shape, A, B, scale, _BLOCK_O, _BLOCK_I, blocks, W)


def merge_delta_fp8(W: Tensor, scale_inv: Tensor, A: Tensor, B: Tensor, scale: float) -> None:
    tensors = (W, scale_inv)
    _launch(kernels.merge_delta_fp8, tensors, W.shape, A, B, scale, FP8_BLOCK, FP8_BLOCK, {}, W)


def merge_delta_int4(packed: Tensor, scales: Tensor, A: Tensor, B: Tensor, scale: float) -> None:
    shape = (*packed.shape[:2], A.shape[-1])
    blocks = {"BLOCK_O": _INT4_BLOCK_O, "BLOCK_I": _BLOCK_I}
    tensors = (packed, scales)
    _launch(
        kernels.merge_delta_int4, tensors, shape, A, B, scale, _INT4_BLOCK_O, _BLOCK_I, blocks,
        packed,
    )  # fmt: skip


def _launch(kernel, tensors, shape, A, B, scale, block_o, block_i, blocks, W) -> None:
    E, out, in_features = shape
    if E * out * in_features == 0:
        return
    if A.dtype != B.dtype:
        A, B = A.float(), B.float()
    R = A.shape[-2]
    grid = (triton.cdiv(out, block_o) * triton.cdiv(in_features, block_i), E)
    kernel[grid](
        *tensors, A, B, scale, R, out, in_features, *A.stride(), *B.stride(),
        UPCAST=interpreting(),
        # Three TF32 products keep float32's precision; a float32 W keeps every bit.
        PRECISION="ieee" if W.dtype == torch.float32 else "tf32x3",
        BLOCK_R=min(max(triton.next_power_of_2(R), 16), _MOST_R),
        num_warps=8, **blocks,
    )  # fmt: skip
