"""Launches of the Triton dequantisations, into `[E, out, in]`. No GPU has run them yet: they are
compiled for sm_90 and run in Triton's interpreter by tests."""

from __future__ import annotations

import triton
from torch import Tensor

from lora_moe_rl.kernels.dequant import triton_kernels as kernels
from lora_moe_rl.kernels.dequant.formats import MARLIN_OUT

_TILE = (16, 256)
_FP8_TILE = (32, 128)  # within a block that shares its scale
_MARLIN_TILE = (MARLIN_OUT, 128)


def int4(packed: Tensor, scales: Tensor, out: Tensor) -> None:
    _launch(kernels.int4, packed, scales, out, _TILE)


def fp8(weight: Tensor, scale_inv: Tensor, out: Tensor) -> None:
    _launch(kernels.fp8, weight, scale_inv, out, _FP8_TILE)


def mxfp4(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    _launch(kernels.mxfp4, blocks, scales, out, _TILE)


def int4_marlin(words: Tensor, scales: Tensor, out: Tensor) -> None:
    _launch(kernels.int4_marlin, words, scales, out, _MARLIN_TILE)


def mxfp4_marlin(words: Tensor, scales: Tensor, out: Tensor) -> None:
    _launch(kernels.mxfp4_marlin, words, scales, out, _MARLIN_TILE)


def _launch(kernel, data: Tensor, scales: Tensor, out: Tensor, tile: tuple[int, int]) -> None:
    E, rows, columns = out.shape
    if not out.numel():
        return
    for tensor in (data, scales):
        if not tensor[0].is_contiguous():
            raise ValueError(
                f"{tuple(tensor.shape)} with strides {tensor.stride()}: rows are not whole"
            )
    grid = (triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]), E)
    kernel[grid](
        data, scales, out, rows, columns, data.stride(0), scales.stride(0),
        BLOCK_O=tile[0], BLOCK_I=tile[1], num_warps=4,
    )  # fmt: skip
