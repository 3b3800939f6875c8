"""The arithmetic of a merge: some rows of one base weight, from its bytes to those of the result.

Sums are float32 and rounded once. A quantised weight is dequantised, merged and quantised anew
(`kernels/merge/formats.py`), and how far that is from the exact sum is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_moe_rl.errors import ExportError
from lora_moe_rl.export.merged_plan import Matrix, MergeStep
from lora_moe_rl.files.untrusted import DTYPES
from lora_moe_rl.kernels.merge import formats, merge_delta_, merge_delta_fp8_, merge_delta_int4_


@dataclass
class QuantisationError:
    """Sums of squares over a tensor: `error` of the quantised result against the exact sum W + D,
    `value` of W + D, `delta` of the adapter's D."""

    error: float = 0.0
    value: float = 0.0
    delta: float = 0.0

    def add(self, other: QuantisationError) -> None:
        self.error += other.error
        self.value += other.value
        self.delta += other.delta

    @property
    def relative(self) -> float:
        """||error|| / ||W + D||"""
        return (self.error / self.value) ** 0.5 if self.value else 0.0

    @property
    def over_delta(self) -> float:
        """||error|| / ||D||: above one, the form hides more than the adapter changed."""
        return (self.error / self.delta) ** 0.5 if self.delta else 0.0


Factors = tuple[Tensor, Tensor, float]  # A [r, in], B of the step's rows [rows, r], scale
Result = tuple[dict[str, Tensor], QuantisationError | None]


@torch.no_grad()
def compute(
    step: MergeStep, source: Mapping[str, Tensor], factors: Factors | None, device: str
) -> Result:
    """`{role: tensor on the CPU}` of the step's rows. `source`: `{role: uint8 bytes}`.

    Raises ExportError when a result is not finite: the base holds NaN or infinity, or float16
    cannot hold a sum.
    """
    tensors = {role: _typed(step, role, data).to(device) for role, data in source.items()}
    if factors is not None:
        factors = (factors[0].to(device), factors[1].to(device), factors[2])
    error = None
    if step.matrix.target_form != "float":
        error = _requantise(step.matrix, tensors, factors)
    else:
        tensors = {"weight": _to_float(step.matrix, tensors, factors)}
    results = {role: tensors[role].cpu() for role in step.matrix.target}
    if step.matrix.target_form == "float" and not _is_finite(results["weight"]):
        dtype = str(results["weight"].dtype).removeprefix("torch.")
        raise ExportError(
            f"{step.matrix.name} would hold NaN or infinity in rows {step.first} to "
            f"{step.first + step.rows}: the base does, or {dtype} cannot hold the sum (then write "
            "another with --dtype)"
        )
    return results, error


def _typed(step: MergeStep, role: str, data: Tensor) -> Tensor:
    place = step.matrix.source[role]
    rows = -(-step.rows // place.rows)
    return data.view(getattr(torch, DTYPES[place.dtype][1])).view(rows, -1)


def _to_float(matrix: Matrix, tensors: dict[str, Tensor], factors: Factors | None) -> Tensor:
    dtype = getattr(torch, DTYPES[matrix.target["weight"].dtype][1])
    value = tensors["weight"]
    if matrix.form != "float":
        value = _dequantise(matrix.form, tensors)
    if factors is None:
        return value.to(dtype)
    if value.dtype != dtype:
        value = value.float()
    return merge_delta_(value, *factors).to(dtype)


def _requantise(
    matrix: Matrix, tensors: dict[str, Tensor], factors: Factors | None
) -> QuantisationError:
    assert factors is not None, "what no adapter changes is copied"
    A, B, scale = factors
    before = _dequantise(matrix.form, tensors)
    exact = before.addmm(B, A, alpha=scale)
    if not _is_finite(exact):
        raise ExportError(f"{matrix.name} holds NaN or infinity in the base: it cannot be merged")
    merge = {"fp8": merge_delta_fp8_, "int4": merge_delta_int4_}[matrix.form]
    merge(tensors["weight"], tensors["scale"], A, B, scale)
    after = _dequantise(matrix.form, tensors)
    return QuantisationError(_square(after - exact), _square(exact), _square(exact - before))


def _dequantise(form: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if form == "fp8":
        return formats.dequantise_fp8(tensors["weight"], tensors["scale"])
    return formats.dequantise_int4(tensors["weight"], tensors["scale"])


def _square(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2


def _is_finite(value: Tensor) -> bool:
    """One pass and no copy: infinities and NaN show in the extremes."""
    if value.numel() == 0:
        return True
    low, high = value.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))
