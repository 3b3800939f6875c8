"""`y[t] = x[t] W[e(t)]^T` for tokens sorted by expert: one linear an expert, in one call."""

from __future__ import annotations

import torch

from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.kernels.grouped_lora.torch_path import grouped, outer


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """x `[T, in]` sorted by expert, weight `[E, out, in]`, counts: tokens of each expert.

    Returns `[T, out]` in x's dtype. Gradients flow to x, and to weight when it requires them; each
    is rounded once. `torch._grouped_mm` where it takes the operands, else one matmul an expert,
    which on a CPU gives the same bits.
    """
    return _GroupedLinear.apply(x, weight, on_device(counts, x.device))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x if weight.requires_grad else None, weight, counts)
        return grouped(x, weight.mT, counts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, weight, counts = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        dx = grouped(dy, weight, counts) if needs_x else None
        dw = outer(dy, x, counts, shared=False) if needs_weight else None
        return dx, dw, None
