"""The arithmetic of a merge: some rows of one base weight, from its bytes to those of the result.

Sums are float32 and rounded once. A quantised weight is dequantised, merged and quantised anew
(`kernels/merge/formats.py`). What that leaves of the adapter's change is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lora_moe_rl.errors import ConfigError, ExportError
from lora_moe_rl.export.merged_plan import Matrix, MergeStep, ShardPlan
from lora_moe_rl.export.merged_targets import TURNED, StoredWeight
from lora_moe_rl.files.untrusted import DTYPES
from lora_moe_rl.kernels.dequant.formats import bad_scales
from lora_moe_rl.kernels.merge import (
    formats,
    merge_delta_fp8_,
    merge_delta_int4_,
    merge_rounded,
)
from lora_moe_rl.kernels.merge.rounding import Arrived, Rounding, measure, seed_of


@dataclass(frozen=True)
class Form:
    """What a merged model is written as. `dtype`: float32, bfloat16 or float16 in place of the
    base's own form; None keeps it. `adapted_float32`: float32 for what the adapter changes, all
    else as the base has it. `rounding` and `seed`: to bfloat16 and float16
    (`kernels/merge/rounding.py`)."""

    dtype: Dtype | None = None
    adapted_float32: bool = False
    rounding: Rounding = "nearest"
    seed: int = 0


Dtype = Literal["float32", "bfloat16", "float16"]
SCALED = ("fp8", "int4")  # whose scales are numbers
Factors = tuple[Tensor, Tensor, float]  # A [r, in], B of the step's rows [rows, r], scale
Result = tuple[dict[str, Tensor], Arrived | None]


def check_form(form: Form, stored: Mapping[str, StoredWeight], shards: list[ShardPlan]) -> None:
    """Raises ExportError for float32 among quantised weights, ConfigError for a rounding that has
    nothing to round."""
    quantised = sorted(weight.name for weight in stored.values() if weight.form != "float")
    if form.adapted_float32 and quantised:
        raise ExportError(
            f"{quantised[0]} is quantised, and what loads such a model takes none of its linears "
            "in float32: write all of it in another form with --dtype"
        )
    changed = (matrix for shard in shards for matrix in shard.matrices if matrix.parts)
    if form.rounding == "stochastic" and not any(
        matrix.target_form == "float" and matrix.target["weight"].dtype != "F32"
        for matrix in changed
    ):
        raise ConfigError(
            "--rounding stochastic has no effect: nothing that the adapter changes is written in "
            "bfloat16 or float16"
        )


@torch.no_grad()
def compute(
    step: MergeStep,
    source: Mapping[str, Tensor],
    factors: Factors | None,
    device: str,
    form: Form,
) -> Result:
    """`{role: tensor on the CPU}` of the step's rows, and what arrived of the adapter's change.
    `source`: `{role: uint8 bytes}`.

    Raises ExportError when a result is not finite: the base holds NaN or infinity, or float16
    cannot hold a sum.
    """
    tensors = {role: _typed(step, role, data).to(device) for role, data in source.items()}
    if step.matrix.form in SCALED and (why := bad_scales(step.matrix.form, tensors["scale"])):
        raise ExportError(f"{step.matrix.name}: {why}; fetch or write the base again")
    if factors is not None:
        factors = (factors[0].to(device), factors[1].to(device), factors[2])
    if step.matrix.target_form != "float":
        arrived = _requantise(step.matrix, tensors, factors)
    else:
        weight, arrived = _to_float(step, tensors, factors, form)
        tensors = {"weight": weight}
    results = {role: tensors[role].cpu() for role in step.matrix.target}
    if step.matrix.target_form == "float" and not _is_finite(results["weight"]):
        dtype = str(results["weight"].dtype).removeprefix("torch.")
        raise ExportError(
            f"{step.matrix.name} would hold NaN or infinity in rows {step.first} to "
            f"{step.first + step.rows}: the base does, or {dtype} cannot hold the sum (then write "
            "another with --dtype)"
        )
    return results, arrived


def _typed(step: MergeStep, role: str, data: Tensor) -> Tensor:
    place = step.matrix.source[role]
    rows = -(-step.rows // place.rows)
    return data.view(getattr(torch, DTYPES[place.dtype][1])).view(rows, -1)


def _to_float(
    step: MergeStep, tensors: dict[str, Tensor], factors: Factors | None, form: Form
) -> tuple[Tensor, Arrived | None]:
    matrix = step.matrix
    dtype = getattr(torch, DTYPES[matrix.target["weight"].dtype][1])
    value = tensors["weight"]
    if matrix.form != "float":
        value = _dequantise(matrix.form, tensors)
    if factors is None:
        return value.to(dtype), None
    seed, first = seed_of(form.seed, matrix.name), step.first * matrix.shape[1]
    return merge_rounded(value, *factors, dtype, form.rounding, seed, first)


def _requantise(matrix: Matrix, tensors: dict[str, Tensor], factors: Factors | None) -> Arrived:
    assert factors is not None, "what no adapter changes is copied"
    A, B, scale = factors
    before = _dequantise(matrix.form, tensors)
    change = (B @ A).mul_(scale)
    if not _is_finite(before + change):
        raise ExportError(f"{matrix.name} holds NaN or infinity in the base: it cannot be merged")
    if matrix.form == "mxfp4":
        tensors["weight"], tensors["scale"] = formats.quantise_mxfp4(before + change)
    else:
        merge = {"fp8": merge_delta_fp8_, "int4": merge_delta_int4_}[matrix.form]
        merge(tensors["weight"], tensors["scale"], A, B, scale)
    after = _dequantise(matrix.form, tensors)
    return measure(before, change, after)


_DEQUANTISE = {
    "fp8": formats.dequantise_fp8,
    "int4": formats.dequantise_int4,
    "mxfp4": formats.dequantise_mxfp4,
    TURNED: lambda weight, scale: formats.dequantise_mxfp4(weight, scale).T.contiguous(),
}


def _dequantise(form: str, tensors: Mapping[str, Tensor]) -> Tensor:
    return _DEQUANTISE[form](tensors["weight"], tensors["scale"])


def _is_finite(value: Tensor) -> bool:
    """One pass and no copy: infinities and NaN show in the extremes."""
    if value.numel() == 0:
        return True
    low, high = value.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))
