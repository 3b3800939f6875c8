"""Launches of the Triton merges. W is `[E, out, in]`, A `[E, r, in]`, B `[E, out, r]`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from lora_moe_rl.kernels.backend import interpreting
from lora_moe_rl.kernels.merge import triton_kernels as kernels
from lora_moe_rl.kernels.merge.formats import FP8_BLOCK

# (rows, columns) of a program's tile, chosen by the registers that ptxas for sm_90 gives it. FP8's
# is fixed, and spills least on sixteen warps.
_BLOCK = (64, 64)
_INT4_BLOCK = (32, 128)
_MOST_R = 32


def merge_delta(out: Tensor, W: Tensor, A: Tensor, B: Tensor, scale: float) -> None:
    blocks = dict(zip(("BLOCK_O", "BLOCK_I"), _BLOCK, strict=True))
    _launch(kernels.merge_delta, (out, W), W.shape, A, B, scale, _BLOCK, **blocks)


def merge_delta_fp8(W: Tensor, scale_inv: Tensor, A: Tensor, B: Tensor, scale: float) -> None:
    tile = (FP8_BLOCK, FP8_BLOCK)
    _launch(kernels.merge_delta_fp8, (W, scale_inv), W.shape, A, B, scale, tile, num_warps=16)


def merge_delta_int4(packed: Tensor, scales: Tensor, A: Tensor, B: Tensor, scale: float) -> None:
    shape = (*packed.shape[:2], A.shape[-1])
    blocks = dict(zip(("BLOCK_O", "BLOCK_I"), _INT4_BLOCK, strict=True))
    tensors = (packed, scales)
    _launch(kernels.merge_delta_int4, tensors, shape, A, B, scale, _INT4_BLOCK, **blocks)


def _launch(kernel, tensors, shape, A, B, scale, tile, num_warps=8, **blocks) -> None:
    E, out, in_features = shape
    if E * out * in_features == 0:
        return
    if A.dtype != B.dtype:
        A, B = A.float(), B.float()
    R = A.shape[-2]
    grid = (triton.cdiv(out, tile[0]) * triton.cdiv(in_features, tile[1]), E)
    kernel[grid](
        *tensors, A, B, scale, R, out, in_features, *A.stride(), *B.stride(),
        UPCAST=interpreting(),
        # Three TF32 products keep float32's precision; a float32 W keeps every bit.
        PRECISION="ieee" if tensors[0].dtype == torch.float32 else "tf32x3",
        BLOCK_R=min(max(triton.next_power_of_2(R), 16), _MOST_R),
        num_warps=num_warps, **blocks,
    )  # fmt: skip
