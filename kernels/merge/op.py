"""Merges of an adapter into its base weight, as calls that change the weight in place.

W is `[out, in]` or, of stacked experts, `[E, out, in]`; A `[E, r, in]` and B `[E, out, r]`, or
without E for a dense weight and for a tensor that all experts share. The result is
`W + scale * B A`, summed in float32 and rounded once. There are no gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lora_moe_rl.kernels import backend
from lora_moe_rl.kernels.merge import formats, torch_path
from lora_moe_rl.kernels.merge.rounding import Arrived, Rounding, measure, round_to


@torch.no_grad()
def merge_delta_(
    W: Tensor,
    A: Tensor,
    B: Tensor,
    scale: float,
    out: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """Into W, or into `out` (W's shape and dtype), which is returned. W: float32, bfloat16 or
    float16. Raises ValueError for shapes that do not fit."""
    target = W if out is None else out
    if target.shape != W.shape or target.dtype != W.dtype:
        raise ValueError(
            f"out is {target.dtype} {tuple(target.shape)}, and W {W.dtype} {tuple(W.shape)}"
        )
    A, B = _stacked(W.shape, A, B)
    target3, W3 = _three(target), None if out is None else _three(W)
    _call(_merge_delta, _merge_delta_op, target3, W3, A, B, scale, kernel)
    return target


@torch.no_grad()
def merge_rounded(
    W: Tensor,
    A: Tensor,
    B: Tensor,
    scale: float,
    dtype: torch.dtype,
    rounding: Rounding = "nearest",
    seed: int = 0,
    first: int = 0,
) -> tuple[Tensor, Arrived]:
    """(`W + scale * B A` in `dtype`, what arrived of the change), of a dense W, which stays as it
    is. `rounding`, `seed` and `first` are those of `rounding.round_to`."""
    before = W.to(torch.float32, copy=True)
    if rounding == "nearest" and dtype == W.dtype:
        after = merge_delta_(W, A, B, scale, out=torch.empty_like(W))
    else:
        exact = merge_delta_(before, A, B, scale, out=torch.empty_like(before))
        after = round_to(exact, dtype, rounding, seed, first)
    change = (B.float() @ A.float()).mul_(scale)
    return after, measure(before, change, after)


@torch.no_grad()
def merge_delta_fp8_(
    W: Tensor, scale_inv: Tensor, A: Tensor, B: Tensor, scale: float, kernel: str = "auto"
) -> None:
    """Into an FP8 block-128 weight (`formats.py`): dequantised, merged, and quantised anew with new
    scales. Raises ValueError for shapes that do not fit."""
    blocks = tuple(-(-n // formats.FP8_BLOCK) for n in W.shape[-2:])
    if scale_inv.shape != (*W.shape[:-2], *blocks) or scale_inv.dtype != torch.float32:
        raise ValueError(
            f"scale_inv is {scale_inv.dtype} {tuple(scale_inv.shape)}; of a weight "
            f"{tuple(W.shape)} it is float32 {(*W.shape[:-2], *blocks)}"
        )
    A, B = _stacked(W.shape, A, B)
    _call(_merge_delta_fp8, _merge_delta_fp8_op, _three(W), _three(scale_inv), A, B, scale, kernel)


@torch.no_grad()
def merge_delta_int4_(
    packed: Tensor, scales: Tensor, A: Tensor, B: Tensor, scale: float, kernel: str = "auto"
) -> None:
    """Into an INT4 group-32 weight (`formats.py`): dequantised, merged, and quantised anew with new
    scales. Raises ValueError for shapes that do not fit."""
    in_features = packed.shape[-1] * formats.INT4_IN_WORD
    formats.check_int4_width(in_features)
    groups = (*packed.shape[:-1], in_features // formats.INT4_GROUP)
    if scales.shape != groups or packed.dtype != torch.int32:
        raise ValueError(
            f"packed is {packed.dtype} {tuple(packed.shape)} with scales {tuple(scales.shape)}; it "
            f"is torch.int32, and the scales {groups}"
        )
    A, B = _stacked((*packed.shape[:-1], in_features), A, B)
    operands = (_three(packed), _three(scales), A, B, scale, kernel)
    _call(_merge_delta_int4, _merge_delta_int4_op, *operands)


def _call(op, function, W: Tensor, *operands) -> None:
    """Calls the op where torch.compile traces, and the plain function elsewhere: the first call of
    an op imports torch._dynamo, five seconds of a core and 300 MB."""
    *tensors, kernel = operands
    chosen = backend.resolve(kernel, W.device)
    (op if torch.compiler.is_compiling() else function)(W, *tensors, chosen)


def _three(W: Tensor) -> Tensor:
    """W with experts. Raises ValueError when it is not contiguous."""
    if not W.is_contiguous():
        raise ValueError(
            f"a weight {tuple(W.shape)} with strides {W.stride()} cannot be merged in place: pass "
            "a contiguous one"
        )
    return W if W.dim() == 3 else W[None]


def _stacked(shape, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """A and B with experts, as many as the weight has."""
    *stack, out, in_features = shape
    E, rank = stack[0] if stack else 1, A.shape[-2]
    expected = {"A": (rank, in_features), "B": (out, rank)}
    result = []
    for (name, own), tensor in zip(expected.items(), (A, B), strict=True):
        if tuple(tensor.shape) not in (own, (*stack, *own)):
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}; for a weight {tuple(shape)} at rank "
                f"{rank} it is {(*stack, *own)}"
            )
        result.append(tensor if tensor.dim() == 3 else tensor.expand(E, *own))
    return result[0], result[1]


def _path(kernel: str):
    if kernel == "torch":
        return torch_path
    from lora_moe_rl.kernels.merge import triton_path  # Triton is not on every machine

    return triton_path


def _merge_delta_op(
    out: Tensor, W: Tensor | None, A: Tensor, B: Tensor, scale: float, kernel: str
) -> None:
    _path(kernel).merge_delta(out, out if W is None else W, A, B, scale)


def _merge_delta_fp8_op(
    W: Tensor, scale_inv: Tensor, A: Tensor, B: Tensor, scale: float, kernel: str
) -> None:
    _path(kernel).merge_delta_fp8(W, scale_inv, A, B, scale)


def _merge_delta_int4_op(
    packed: Tensor, scales: Tensor, A: Tensor, B: Tensor, scale: float, kernel: str
) -> None:
    _path(kernel).merge_delta_int4(packed, scales, A, B, scale)


# Opaque to torch.compile; nothing is returned, so that a fake has nothing to say.
_merge_delta = torch.library.custom_op(
    "lora_moe_rl::merge_delta", _merge_delta_op, mutates_args=("out",)
)
_merge_delta_fp8 = torch.library.custom_op(
    "lora_moe_rl::merge_delta_fp8", _merge_delta_fp8_op, mutates_args=("W", "scale_inv")
)
_merge_delta_int4 = torch.library.custom_op(
    "lora_moe_rl::merge_delta_int4", _merge_delta_int4_op, mutates_args=("packed", "scales")
)
for _op in (_merge_delta, _merge_delta_fp8, _merge_delta_int4):
    _op.register_fake(lambda *_: None)
