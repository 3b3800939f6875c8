"""`y[t] = x[t] W[e(t)]^T` for tokens sorted by expert: one linear an expert, in one call."""

from __future__ import annotations

import torch

_CUDA_MULTIPLE = 8  # torch._grouped_mm wants rows of 16 bytes: 8 elements of bfloat16


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """x `[T, in]` sorted by expert, weight `[E, out, in]`, counts: tokens of each expert.

    Returns `[T, out]` in x's dtype. Gradients flow to x, and to weight when it requires them.
    CUDA in bfloat16 uses `torch._grouped_mm`; otherwise one matmul an expert, which on a CPU is
    both the fastest plain form and exact in float32.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return _grouped_mm(x, weight, counts)
    return _LoopLinear.apply(x, weight, counts)


def _grouped_mm(x: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> torch.Tensor:
    out_features = weight.shape[1]
    pad_in = -x.shape[1] % _CUDA_MULTIPLE
    pad_out = -out_features % _CUDA_MULTIPLE
    if pad_in or pad_out:
        x = torch.nn.functional.pad(x, (0, pad_in))
        weight = torch.nn.functional.pad(weight, (0, pad_in, 0, pad_out))
    offsets = torch.tensor(counts, device=x.device).cumsum(0).to(torch.int32)
    y = torch._grouped_mm(x.contiguous(), weight.transpose(-2, -1), offs=offsets)
    return y[:, :out_features]


class _LoopLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts):
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.counts, ctx.x_shape = counts, x.shape
        y = x.new_empty(x.shape[0], weight.shape[1])
        for e, start, stop in _spans(counts):
            torch.mm(x[start:stop], weight[e].t(), out=y[start:stop])
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = dy.new_empty(ctx.x_shape)
            for e, start, stop in _spans(ctx.counts):
                torch.mm(dy[start:stop], weight[e], out=dx[start:stop])
        if ctx.needs_input_grad[1]:
            dw = torch.zeros_like(weight)
            for e, start, stop in _spans(ctx.counts):
                torch.mm(dy[start:stop].t(), x[start:stop], out=dw[e])
        return dx, dw, None


def _spans(counts: list[int]):
    """(expert, first token, end) of each expert that has tokens."""
    start = 0
    for e, count in enumerate(counts):
        if count:
            yield e, start, start + count
        start += count
