"""Three quantised forms of a weight `[out, in]`, or of stacked experts `[E, out, in]`, as
checkpoints have them.

int4    compressed-tensors' "pack-quantized", symmetric (Kimi-K2-Thinking's `weight_packed` and
        `weight_scale`): eight values in one int32, `[..., out, in / 8]`, the first in the lowest
        bits, each stored plus 8; one scale for 32 values along `in`, `[..., out, in / 32]`.
        The value is q * scale, both in the dtype that is asked for.
fp8     DeepSeek-V3's `weight` and `weight_scale_inv`: float8_e4m3fn, one float32 scale for each
        block of 128 x 128, `[..., ceil(out / 128), ceil(in / 128)]`.
        The value is weight * scale in float32, then in the dtype that is asked for.
mxfp4   OCP's MXFP4 in gpt-oss's layout (`…_blocks` and `…_scales`): uint8
        `[..., out, in / 32, 16]`, two values of E2M1 in a byte, the first in the lower half; one
        exponent for 32 values, uint8 `[..., out, in / 32]`. The value is e2m1 * 2^(exponent - 127).
        compressed-tensors has the same bytes, as `[..., out, in / 2]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Form = Literal["int4", "fp8", "mxfp4"]
FORMS: tuple[Form, ...] = get_args(Form)

FP8_BLOCK = 128
INT4_GROUP, INT4_IN_WORD = 32, 8
MXFP4_GROUP = 32
MXFP4_BIAS = 127
MXFP4_NAN = 255  # the exponent that stands for no number
# E2M1: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# {form: (multiple of out, multiple of in that a cut or a stack keeps whole)}
MULTIPLES: dict[Form, tuple[int, int]] = {
    "int4": (1, INT4_GROUP),
    "fp8": (FP8_BLOCK, FP8_BLOCK),
    "mxfp4": (1, MXFP4_GROUP),
}
DATA_DTYPES: dict[Form, torch.dtype] = {
    "int4": torch.int32,
    "fp8": torch.float8_e4m3fn,
    "mxfp4": torch.uint8,
}


@dataclass(frozen=True)
class Packed:
    """A quantised weight: what its checkpoint has, and nothing else. `data` and `scales` may be
    views of larger tensors, with whole rows."""

    form: Form
    data: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"{self.form!r} is no form of a weight; there are {', '.join(FORMS)}")
        if self.data.dtype != DATA_DTYPES[self.form]:
            raise ValueError(
                f"an {self.form} weight is {DATA_DTYPES[self.form]}, not {self.data.dtype}"
            )
        data, scales = packed_shapes(self.form, self.shape)
        if tuple(self.data.shape) != data or tuple(self.scales.shape) != scales:
            raise ValueError(
                f"an {self.form} weight of shape {self.shape} has data {data} and scales {scales}, "
                f"not {tuple(self.data.shape)} and {tuple(self.scales.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight that it stands for."""
        shape = tuple(self.data.shape)
        if self.form == "int4":
            return (*shape[:-1], shape[-1] * INT4_IN_WORD)
        return shape if self.form == "fp8" else (*shape[:-2], shape[-2] * MXFP4_GROUP)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def of(self, experts: slice | int) -> Packed:
        return Packed(self.form, self.data[experts], self.scales[experts])


def packed_shapes(form: Form, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(of the data, of the scales) of a weight of `shape`. Raises ValueError for a weight whose
    rows are not whole groups."""
    *stack, out, in_features = shape
    multiple = MULTIPLES[form][1]
    if form == "fp8":
        return shape, (*stack, -(-out // FP8_BLOCK), -(-in_features // FP8_BLOCK))
    if in_features % multiple:
        raise ValueError(
            f"an {form} weight has {in_features} input features, which are not whole groups of "
            f"{multiple}"
        )
    groups = in_features // multiple
    if form == "int4":
        return (*stack, out, in_features // INT4_IN_WORD), (*stack, out, groups)
    return (*stack, out, groups, MXFP4_GROUP // 2), (*stack, out, groups)


def bad_scales(form: Form, scales: Tensor) -> str | None:
    """What is wrong with scales, None when nothing is: a weight of zeros has scales of one."""
    if form == "mxfp4":
        wrong = int((scales == MXFP4_NAN).sum())
        return f"{wrong} scales are no numbers" if wrong else None
    if not bool(scales.isfinite().all()):
        return f"{int((~scales.isfinite()).sum())} scales are no finite numbers"
    wrong = int((scales <= 0).sum())
    return f"{wrong} scales are not above zero" if wrong else None
