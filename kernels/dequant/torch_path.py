"""The dequantisations in plain torch, into `[E, out, in]`, one expert at a time so that little but
the result is added to memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lora_moe_rl.kernels.dequant.formats import (
    E2M1,
    FP8_BLOCK,
    INT4_GROUP,
    INT4_IN_WORD,
    MXFP4_BIAS,
    MXFP4_GROUP,
)


def int4(packed: Tensor, scales: Tensor, out: Tensor) -> None:
    for words, scales_e, target in zip(packed, scales, out, strict=True):
        pairs = words.view(torch.uint8)  # [out, in / 2], the first of two in the lower half
        target[:, 0::2] = (pairs & 15).view(torch.int8) - 8
        target[:, 1::2] = (pairs >> 4).view(torch.int8) - 8
        target.unflatten(-1, (-1, INT4_GROUP)).mul_(scales_e.to(out.dtype)[..., None])


def fp8(weight: Tensor, scale_inv: Tensor, out: Tensor) -> None:
    dtype = torch.promote_types(out.dtype, torch.float32)
    for weight_e, scales_e, target in zip(weight, scale_inv, out, strict=True):
        for row, scales_row in enumerate(scales_e.to(dtype)):
            rows = slice(row * FP8_BLOCK, (row + 1) * FP8_BLOCK)
            wide = scales_row.repeat_interleave(FP8_BLOCK)[: weight.shape[-1]]
            target[rows] = weight_e[rows].to(dtype) * wide


def mxfp4(blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    # Exact in every dtype that has float32's exponents: E2M1 has two bits, a power of two none.
    dtype = torch.promote_types(out.dtype, torch.float32)
    values = torch.tensor(E2M1, device=out.device, dtype=dtype)
    for blocks_e, scales_e, target in zip(blocks, scales, out, strict=True):
        pairs = blocks_e.flatten(-2).int()
        target[:, 0::2] = values[pairs & 15].to(out.dtype)
        target[:, 1::2] = values[pairs >> 4].to(out.dtype)
        powers = torch.exp2(scales_e.to(dtype) - MXFP4_BIAS).to(out.dtype)
        target.unflatten(-1, (-1, MXFP4_GROUP)).mul_(powers[..., None])


def int4_marlin(words: Tensor, scales: Tensor, out: Tensor) -> None:
    for words_e, scales_e, target in zip(words, scales, out, strict=True):
        for codes, places in _of_tiles(words_e, target):
            places.copy_(codes - 8)
        of_rows = scales_e.unflatten(1, (-1, 8, 8)).transpose(2, 3).flatten(1).T
        target.unflatten(-1, (-1, INT4_GROUP)).mul_(of_rows.to(out.dtype)[..., None])


def mxfp4_marlin(words: Tensor, scales: Tensor, out: Tensor) -> None:
    dtype = torch.promote_types(out.dtype, torch.float32)
    values = torch.tensor(E2M1, device=out.device, dtype=dtype)
    for words_e, scales_e, target in zip(words, scales, out, strict=True):
        for codes, places in _of_tiles(words_e, target):
            places.copy_(values[codes])
        # [groups, tiles, o0-2, o5, o3, o4]
        of_rows = scales_e.unflatten(1, (-1, 8, 2, 2, 2)).permute(0, 1, 3, 5, 4, 2).flatten(1).T
        powers = torch.exp2(of_rows.to(dtype) - MXFP4_BIAS).to(out.dtype)
        target.unflatten(-1, (-1, MXFP4_GROUP)).mul_(powers[..., None])


def _of_tiles(words: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(codes, their places in `target` `[out, in]`) of each of the eight in all words."""
    # [tiles, o4-5, o0-2, tiles, i1-2] of [tiles, tiles, o0-2, i1-2, o4-5]
    tiles = words.unflatten(1, (-1, 8, 4, 4)).permute(1, 4, 2, 0, 3)
    # [tiles, o4-5, o3, o0-2, tiles, i3, i1-2, i0]
    places = target.unflatten(1, (-1, 2, 4, 2)).unflatten(0, (-1, 4, 2, 8))
    for n in range(INT4_IN_WORD):
        yield tiles >> 4 * n & 15, places[:, :, n >> 1 & 1, :, :, n & 1, :, n >> 2]
