"""Activations as an engine's FP8 kernels read them: each token's groups of 128 inputs in
float8_e4m3fn, with a float32 scale that makes the group's largest 448.

As vLLM's `per_token_group_quant_fp8` with scales that are no powers of two, which stands before its
block-wise FP8 linears and experts on GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lora_moe_rl.kernels.dequant.formats import FP8_BLOCK

FP8_MAX = 448.0
SMALLEST = 1e-10  # vLLM's eps: what a group's largest counts as at least


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[..., in]` as (float8_e4m3fn `[..., in]`, float32 scales `[..., ceil(in / 128)]`)."""
    groups = _groups(x)
    scales = groups.abs().amax(dim=-1).clamp(min=SMALLEST) / FP8_MAX
    scaled = (groups / scales[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(torch.float8_e4m3fn).flatten(-2)[..., : x.shape[-1]], scales


def rounded(x: Tensor) -> Tensor:
    """x `[..., in]` after both ways, in its dtype. Gradients pass as if nothing was rounded."""
    return _Rounded.apply(x)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        q, scales = quantise(x)
        values = (_groups(q.float()) * scales[..., None]).flatten(-2)
        return values[..., : x.shape[-1]].to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy


def _groups(x: Tensor) -> Tensor:
    """`[..., groups, 128]` in float32, the last filled up with zeros."""
    return pad(x.float(), (0, -x.shape[-1] % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
