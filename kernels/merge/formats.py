"""Two of the quantised forms of `kernels/dequant/formats.py`, both ways, in plain torch.

Weights are `[..., out, in]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_moe_rl.kernels.dequant import Packed, dequantise
from lora_moe_rl.kernels.dequant.formats import FP8_BLOCK, INT4_GROUP, INT4_IN_WORD

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


def _spread_blocks(scale: Tensor, shape) -> Tensor:
    wide = scale.repeat_interleave(FP8_BLOCK, dim=-2).repeat_interleave(FP8_BLOCK, dim=-1)
    return wide[..., : shape[-2], : shape[-1]]
