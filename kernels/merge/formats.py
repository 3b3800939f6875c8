"""Two quantised weight formats, in plain torch. Weights are `[..., out, in]`.

FP8 block-128 (DeepSeek-V3's `weight` and `weight_scale_inv`): float8_e4m3fn, one float32 scale for
each 128 x 128 block, `[..., ceil(out / 128), ceil(in / 128)]`; the value is weight * scale.

INT4 group-32 (compressed-tensors' "pack-quantized", symmetric, as Kimi-K2-Thinking's
`weight_packed` and `weight_scale`): eight values in one int32, `[..., out, in / 8]`, the first in
the lowest bits, each stored plus 8; one scale for 32 values along `in`, `[..., out, in / 32]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_BLOCK, FP8_MAX = 128, 448.0
INT4_GROUP, INT4_IN_WORD = 32, 8
# compressed-tensors' symmetric scale: half of the 15 steps between -8 and 7.
INT4_HALF_RANGE = 7.5


def dequantise_fp8(weight: Tensor, scale_inv: Tensor, dtype=torch.float32) -> Tensor:
    return weight.to(dtype) * _spread_blocks(scale_inv, weight.shape).to(dtype)


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
    shifts = 4 * torch.arange(INT4_IN_WORD, device=packed.device, dtype=torch.int32)
    values = ((packed[..., None] >> shifts) & 15) - 8
    return values.flatten(-2).to(dtype) * scales.to(dtype).repeat_interleave(INT4_GROUP, dim=-1)


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
