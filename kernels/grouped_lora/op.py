"""Grouped LoRA as one call with gradients.

Shape letters: T tokens sorted by expert, E experts, r the rank of a site, R the ranks of the sites
that share one A (gate and up), out the features of a site.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lora_moe_rl.kernels import backend
from lora_moe_rl.kernels.grouped_lora import torch_path


def grouped_lora(
    x: Tensor,
    A: Tensor,
    Bs: Sequence[Tensor],
    counts: Tensor | Sequence[int],
    scales: Sequence[float],
    kernel: str = "auto",
    into: Tensor | None = None,
    recompute: bool = False,
    ranks: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """`[T, sum out]`, the sites side by side: `scale_i * (x A_e,i^T) B_e,i^T` for e the token's.

    x: `[T, in]`, float32, bfloat16 or float16 (float64 with kernel "torch").
    A: `[E, R, in]`, or `[R, in]` shared by all experts; Bs: of each site `[E, out, r]`, or
        `[out, r]` shared. In x's dtype or float32; they are rounded to x's dtype where they are
        multiplied, and their gradients have their own dtype.
    counts: tokens of each expert, `[E]`, summing to T. On a device that is not checked: Triton
        gives tokens beyond the sum zeros, and experts no tokens beyond T; torch asserts it there.
    scales: of each site.
    kernel: "auto" (Triton on CUDA, torch elsewhere), "triton" or "torch". Triton never waits for
        the device and accumulates in float32 with one rounding an output; torch rounds each
        product to x's dtype, and copies counts to the host for shapes `torch._grouped_mm` refuses.
    into: `[T, sum out]` in x's dtype, rows of one piece each: the result is added to it in place,
        and it is returned.
    recompute: `x A^T` is computed again in the backward and not kept.
    ranks: `[E]`: in each site, rows of A and columns of B beyond an expert's rank count as zero.

    Raises ValueError for shapes that do not fit, and ConfigError for a kernel that cannot run.
    """
    chosen = backend.resolve(kernel, x.device)
    _check(x, A, Bs, scales, len(counts), into)
    counts = _counts(counts, x, chosen)
    if ranks is not None:
        ranks = backend.on_device(ranks, x.device).contiguous()
    options = (counts, list(scales), ranks, chosen, recompute)
    return _GroupedLora.apply(into, x, A, options, *Bs)


def _check(x, A, Bs, scales, E, into) -> None:
    """Raises ValueError."""
    T, in_features = x.shape
    if len(Bs) != len(scales) or not Bs:
        raise ValueError(f"{len(Bs)} sites have {len(scales)} scales")
    R, out = sum(B.shape[-1] for B in Bs), sum(B.shape[-2] for B in Bs)
    for name, tensor, shape in (
        ("A", A, (R, in_features)),
        *((f"B of site {i}", B, tuple(B.shape[-2:])) for i, B in enumerate(Bs)),
    ):
        if tuple(tensor.shape) not in (shape, (E, *shape)):
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}; it is {(E, *shape)}, or {shape} "
                f"where {E} experts share it"
            )
        if tensor.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name} is {tensor.dtype}; it is float32, or {x.dtype} as x")
    if into is not None and (into.shape != (T, out) or into.dtype != x.dtype):
        raise ValueError(
            f"into is {into.dtype} {tuple(into.shape)}; the result is {x.dtype} {(T, out)}"
        )
    if into is not None and T and (into.stride(1) != 1 or (T > 1 and into.stride(0) < out)):
        raise ValueError(
            f"into has the strides {into.stride()}: its rows have to be of one piece each, and "
            "beside each other; hand in a contiguous tensor"
        )


def _counts(counts: Tensor | Sequence[int], x: Tensor, kernel: str) -> Tensor:
    """The counts on x's device, in one piece. Raises ValueError for a sum that the host sees to be
    wrong."""
    T, tensor = x.shape[0], isinstance(counts, Tensor)
    if not tensor or (counts.device.type == "cpu" and not _traced(counts)):
        total = int(counts.sum()) if tensor else sum(counts)
        if total != T:
            raise ValueError(f"counts sum to {total}, and x has {T} tokens")
    elif kernel == "torch" and counts.is_cuda:
        torch._assert_async(counts.sum() == T, "counts do not sum to x's tokens")
    return backend.on_device(counts, x.device).contiguous()


class _GroupedLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, into, x, A, options, *Bs):
        counts, scales, ranks, kernel, recompute = options
        y = x.new_empty(x.shape[0], sum(B.shape[-2] for B in Bs)) if into is None else into
        add = into is not None
        forward = _forward if _traced(x) else _forward_op
        xa = forward(y, add, x, A, list(Bs), counts, scales, ranks, kernel)
        ctx.save_for_backward(x, A, counts, ranks, None if recompute else xa, *Bs)
        ctx.scales, ctx.kernel = scales, kernel
        if add:
            ctx.mark_dirty(into)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *grads: Any):
        (dy,) = grads
        x, A, counts, ranks, xa, *Bs = ctx.saved_tensors
        needs_into, needs_x, needs_A, _, *needs_B = ctx.needs_input_grad
        needs = [needs_x, needs_A, any(needs_B)]
        backward = _backward if _traced(dy) else _backward_op
        dx, dA, *dBs = backward(dy, x, A, Bs, counts, ctx.scales, ranks, xa, needs, ctx.kernel)
        return (
            dy if needs_into else None,
            dx if needs_x else None,
            dA if needs_A else None,
            None,
            *(dB if wanted else None for dB, wanted in zip(dBs, needs_B, strict=True)),
        )


def _traced(x: Tensor) -> bool:
    """Whether x stands for values to come: then an operator is called, which knows shapes alone.
    Otherwise the function behind it, which saves 80 microseconds a call on the CPU."""
    plain = type(x) in (Tensor, torch.nn.Parameter)
    return torch.compiler.is_compiling() or x.device.type == "meta" or not plain


def _path(kernel: str):
    if kernel == "torch":
        return torch_path
    from lora_moe_rl.kernels.grouped_lora import triton_path  # Triton is not on every machine

    return triton_path


def _forward_op(
    y: Tensor,
    add: bool,
    x: Tensor,
    A: Tensor,
    Bs: list[Tensor],
    counts: Tensor,
    scales: list[float],
    ranks: Tensor | None,
    kernel: str,
) -> Tensor:
    if x.shape[0] == 0:
        return x.new_empty(0, A.shape[-2])
    return _path(kernel).forward(y, add, x, A, Bs, counts, scales, ranks)


def _backward_op(
    dy: Tensor,
    x: Tensor,
    A: Tensor,
    Bs: list[Tensor],
    counts: Tensor,
    scales: list[float],
    ranks: Tensor | None,
    xa: Tensor | None,
    needs: list[bool],
    kernel: str,
) -> list[Tensor]:
    if x.shape[0] == 0:
        return [torch.zeros_like(t) for t in (x, A, *Bs)]
    grads = _path(kernel).backward(dy, x, A, Bs, counts, scales, ranks, xa, needs)
    return [x.new_empty(0) if grad is None else grad for grad in grads]


# Opaque to torch.compile, with shapes for it and for meta tensors.
_forward = torch.library.custom_op("lora_moe_rl::grouped_lora", _forward_op, mutates_args=("y",))
_backward = torch.library.custom_op(
    "lora_moe_rl::grouped_lora_backward", _backward_op, mutates_args=()
)


@_forward.register_fake
def _(y, add, x, A, Bs, counts, scales, ranks, kernel):
    return x.new_empty(x.shape[0], A.shape[-2])


@_backward.register_fake
def _(dy, x, A, Bs, counts, scales, ranks, xa, needs, kernel):
    wanted = [needs[0], needs[1]] + [needs[2]] * len(Bs)
    tensors = (x, A, *Bs)
    return [t.new_empty(t.shape) if want else x.new_empty(0) for t, want in zip(tensors, wanted)]
