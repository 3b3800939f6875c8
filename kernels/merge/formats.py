"""The quantised forms of `kernels/dequant/formats.py`, both ways, in plain torch.

Weights are `[..., out, in]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_moe_rl.kernels.dequant import Packed, dequantise
from lora_moe_rl.kernels.dequant.formats import (
    E2M1,
    FP8_BLOCK,
    INT4_GROUP,
    INT4_IN_WORD,
    MXFP4_BIAS,
    MXFP4_GROUP,
)

FP8_MAX = 448.0
# compressed-tensors' symmetric scale: half of the 15 steps between -8 and 7.
INT4_HALF_RANGE = 7.5


def dequantise_fp8(weight: Tensor, scale_inv: Tensor, dtype=torch.float32) -> Tensor:
    return dequantise(Packed("fp8", weight, scale_inv), dtype, "torch")


def quantise_fp8(value: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn weight, float32 scale_inv): a block's largest element becomes 448."""
    out, in_features = value.shape[-2:]
    pad = (0, -in_features % FP8_BLOCK, 0, -out % FP8_BLOCK)
    blocks = torch.nn.functional.pad(value.abs(), pad)
    blocks = blocks.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    largest = blocks.amax(dim=(-3, -1))
    scale_inv = torch.where(largest > 0, largest / FP8_MAX, 1.0).to(torch.float32)
    scaled = value / _spread_blocks(scale_inv, value.shape).to(value.dtype)
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale_inv


def dequantise_int4(packed: Tensor, scales: Tensor, dtype=torch.float32) -> Tensor:
    return dequantise(Packed("int4", packed, scales), dtype, "torch")


def quantise_int4(value: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(packed int32, scales). Raises ValueError when `in` is no multiple of 32."""
    check_int4_width(value.shape[-1])
    groups = value.unflatten(-1, (-1, INT4_GROUP))
    scales = (groups.abs().amax(dim=-1) / INT4_HALF_RANGE).to(scale_dtype)
    scales = torch.where(scales > 0, scales, 1.0).to(scale_dtype)
    steps = (groups / scales[..., None].to(value.dtype)).round().clamp(-8, 7).to(torch.int32) + 8
    shifts = 4 * torch.arange(INT4_IN_WORD, device=value.device, dtype=torch.int32)
    words = (steps.flatten(-2).unflatten(-1, (-1, INT4_IN_WORD)) << shifts).sum(-1)
    return words.to(torch.int32), scales


def check_int4_width(in_features: int) -> None:
    if in_features % INT4_GROUP:
        raise ValueError(
            f"an INT4 weight has {in_features} input features, which are not whole groups of "
            f"{INT4_GROUP}"
        )


def dequantise_mxfp4(packed: Tensor, exponents: Tensor, dtype=torch.float32) -> Tensor:
    """The numbers of MXFP4 weights in compressed-tensors' layout, `[..., out, in / 2]`. A group
    whose exponent is 255 is NaN."""
    blocks = packed.unflatten(-1, (-1, MXFP4_GROUP // 2))
    return dequantise(Packed("mxfp4", blocks, exponents), dtype, "torch")


def quantise_mxfp4(value: Tensor) -> tuple[Tensor, Tensor]:
    """(packed uint8 `[..., out, in / 2]`, exponents uint8 `[..., out, in / 32]`), by OCP's rule:
    the largest value of a group has the largest exponent of E2M1, and one beyond 6 becomes 6.
    What lies between two values becomes the nearer one, halfway the one of an even mantissa. Raises
    ValueError when `in` is no multiple of 32."""
    if value.shape[-1] % MXFP4_GROUP:
        raise ValueError(
            f"an MXFP4 weight has {value.shape[-1]} input features, which are not whole groups of "
            f"{MXFP4_GROUP}"
        )
    groups = value.unflatten(-1, (-1, MXFP4_GROUP))
    largest = groups.abs().amax(dim=-1)
    # largest = mantissa * 2^exponent, with a mantissa from 1/2 to 1
    exponents = (torch.frexp(largest).exponent - 3).clamp(min=1 - MXFP4_BIAS)
    scaled = torch.ldexp(groups, -exponents[..., None]).flatten(-2)
    codes = torch.bucketize(scaled.abs(), _halfways(value)) + 8 * (scaled < 0)
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + MXFP4_BIAS).to(torch.uint8)


def _halfways(like: Tensor) -> Tensor:
    """The largest number that is rounded down to each value of E2M1 but the last."""
    values = torch.tensor(E2M1[:8], dtype=like.dtype, device=like.device)
    halfways = (values[1:] + values[:-1]) / 2
    below = torch.nextafter(halfways, torch.zeros_like(halfways))
    to_odd = torch.arange(len(halfways), device=like.device) % 2 == 1
    return torch.where(to_odd, below, halfways)


def _spread_blocks(scale: Tensor, shape) -> Tensor:
    wide = scale.repeat_interleave(FP8_BLOCK, dim=-2).repeat_interleave(FP8_BLOCK, dim=-1)
    return wide[..., : shape[-2], : shape[-1]]
