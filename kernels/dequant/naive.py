"""The readable reference of the dequantisations: one number at a time, of a weight `[out, in]`."""

from __future__ import annotations

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


def int4(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    out, words = packed.shape
    weight = torch.empty(out, words * INT4_IN_WORD, dtype=dtype)
    for o in range(out):
        for i in range(words * INT4_IN_WORD):
            word = int(packed[o, i // INT4_IN_WORD])
            q = ((word >> (4 * (i % INT4_IN_WORD))) & 15) - 8
            weight[o, i] = q * scales[o, i // INT4_GROUP].to(dtype)
    return weight


def fp8(weight: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.empty(weight.shape, dtype=dtype)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            scale = scale_inv[o // FP8_BLOCK, i // FP8_BLOCK].to(torch.float32)
            result[o, i] = weight[o, i].to(torch.float32) * scale
    return result


def mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    out, groups, _ = blocks.shape
    weight = torch.empty(out, groups * MXFP4_GROUP, dtype=dtype)
    for o in range(out):
        for i in range(groups * MXFP4_GROUP):
            group, place = divmod(i, MXFP4_GROUP)
            byte = int(blocks[o, group, place // 2])
            exponent = int(scales[o, group]) - MXFP4_BIAS
            weight[o, i] = E2M1[byte >> 4 if place % 2 else byte & 15] * 2.0**exponent
    return weight


def int4_marlin(words: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    weight = torch.empty(scales.shape[1], words.shape[0] * 16, dtype=dtype)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            scale = scales[i // INT4_GROUP, o // 64 * 64 + o % 8 * 8 + o // 8 % 8]
            weight[o, i] = (_in_tile(words, o, i) - 8) * scale.to(dtype)
    return weight


def mxfp4_marlin(words: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    weight = torch.empty(scales.shape[1], words.shape[0] * 16, dtype=dtype)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            place = o % 8 * 8 + o // 32 % 2 * 4 + o // 8 % 2 * 2 + o // 16 % 2
            exponent = int(scales[i // MXFP4_GROUP, o // 64 * 64 + place]) - MXFP4_BIAS
            weight[o, i] = E2M1[_in_tile(words, o, i)] * 2.0**exponent
    return weight


def _in_tile(words: Tensor, o: int, i: int) -> int:
    """The four bits of a weight that Marlin's tiles have."""
    word = o // 64 * 128 + o % 8 * 16 + i // 2 % 4 * 4 + o // 16 % 4
    in_word = i % 2 * 4 + o // 8 % 2 * 2 + i // 8 % 2
    return int(words[i // 16, word]) >> 4 * in_word & 15
