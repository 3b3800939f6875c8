"""Quantised forms of a weight `[out, in]`, or of stacked experts `[E, out, in]`: three as
checkpoints have them, and two of those as vLLM lays them out for its Marlin kernels.

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

int4_marlin, mxfp4_marlin   the same values and scales in another order, `[..., in / 16, out * 2]`
        int32 and `[..., in / 32, out]`. A row of words has tiles of 16 inputs by 64 outputs, 128
        words each. Of a weight's place (i, o) in its tile, by bits from the lowest:

            word        o4 o5   i1 i2   o0 o1 o2
            in a word   i3   o3   i0

        Of 64 scales of a group that of o stands at `o3 o4 o5  o0 o1 o2`, in mxfp4_marlin at
        `o4 o3 o5  o0 o1 o2`. From vLLM 0.31: `gptq_marlin_repack`, whose order in torch is
        `get_weight_perm` of `quantization/utils/marlin_utils_test.py`, `marlin_permute_scales`
        of `marlin_utils.py` and `mxfp4_marlin_process_scales` of `marlin_utils_fp4.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Form = Literal["int4", "fp8", "mxfp4", "int4_marlin", "mxfp4_marlin"]
FORMS: tuple[Form, ...] = ("int4", "fp8", "mxfp4")  # of checkpoints
MARLIN: dict[Form, Form] = {"int4": "int4_marlin", "mxfp4": "mxfp4_marlin"}

FP8_BLOCK = 128
INT4_GROUP, INT4_IN_WORD = 32, 8
MXFP4_GROUP = 32
MXFP4_BIAS = 127
MARLIN_IN, MARLIN_OUT = 16, 64  # a tile
MXFP4_NAN = 255  # the exponent that stands for no number
# E2M1: a sign, two bits of exponent, one of mantissa.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# {form: (multiple of out, multiple of in that a cut or a stack keeps whole)}
MULTIPLES: dict[Form, tuple[int, int]] = {
    "int4": (1, INT4_GROUP),
    "fp8": (FP8_BLOCK, FP8_BLOCK),
    "mxfp4": (1, MXFP4_GROUP),
    "int4_marlin": (MARLIN_OUT, INT4_GROUP),
    "mxfp4_marlin": (MARLIN_OUT, MXFP4_GROUP),
}
DATA_DTYPES: dict[Form, torch.dtype] = {
    "int4": torch.int32,
    "fp8": torch.float8_e4m3fn,
    "mxfp4": torch.uint8,
    "int4_marlin": torch.int32,
    "mxfp4_marlin": torch.int32,
}


@dataclass(frozen=True)
class Packed:
    """A quantised weight: what its checkpoint has, and nothing else, in the order that `form` says.
    `data` and `scales` may be views of larger tensors, with whole rows."""

    form: Form
    data: Tensor
    scales: Tensor

    def __post_init__(self) -> None:
        if self.form not in DATA_DTYPES:
            raise ValueError(
                f"{self.form!r} is no form of a weight; there are {', '.join(DATA_DTYPES)}"
            )
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
        """The shape of the weight that the packed values stand for."""
        shape = tuple(self.data.shape)
        if self.form in MARLIN.values():
            *stack, tiles, words = shape
            return (*stack, words * INT4_IN_WORD // MARLIN_IN, tiles * MARLIN_IN)
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
    rows are not whole groups, or that is not whole tiles."""
    *stack, out, in_features = shape
    rows, multiple = MULTIPLES[form]
    if form == "fp8":
        return shape, (*stack, -(-out // FP8_BLOCK), -(-in_features // FP8_BLOCK))
    if in_features % multiple:
        raise ValueError(
            f"an {form} weight has {in_features} input features, which are not whole groups of "
            f"{multiple}"
        )
    groups = in_features // multiple
    if form in MARLIN.values():
        if out % rows:
            raise ValueError(
                f"an {form} weight has {out} rows, which are not whole tiles of {rows}"
            )
        words = out * MARLIN_IN // INT4_IN_WORD
        return (*stack, in_features // MARLIN_IN, words), (*stack, groups, out)
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
