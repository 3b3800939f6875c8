"""One layout against one rank: errors, what is too much, and what would explain it. Pure.

How an error is measured, and why no fault hides in the rounding:

    initial     largest difference of an element of the adapter before training
    loss        |difference| / max(1, |loss|); logprobs likewise, the worst token
    gradients   of each tensor ||difference|| / max(||tensor||, 1e-3 * the largest ||tensor||). A
                sum that is left out changes a tensor by about its own size: even one whose gradient
                is a millionth of the largest then errs by 1e-3, a hundred times the tolerance
    grad norm   |difference| / norm
    adapter     of each tensor ||difference of the updates|| / ||update|| after three steps. Adam
                moves every element by about lr whatever its gradient, also the few whose gradient
                is rounding noise and whose sign may be any: hence the wider tolerance. Adam forgets
                a wrong size; the gradients and the norm are what shows it
    checkpoint  elements of adapter and moments that differ, after one rank has loaded what the
                layout saved and the layout what one rank saved: none may
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lora_moe_rl.adapters.sharding import RULES, kind_of
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.verify.comparisons import largest_scaled
from lora_moe_rl.verify.jobs import MOMENTS, Outcome, Tensors
from lora_moe_rl.verify.report import Check

FLOOR = 1e-3
LAYOUT_QUANTITIES = (
    "initial", "loss", "logprobs", "gradients", "grad norm", "adapter", "checkpoint",
)  # fmt: skip
Tolerances = Mapping[str, float]


def tolerances(computed: float, adapter: float, hugging_face: float | None = None) -> Tolerances:
    """`computed`: of loss, logprobs, gradients and their norm."""
    same = dict.fromkeys(("loss", "logprobs", "gradients", "grad norm"), computed)
    # Drawn from the same seeds; the last bits of a start from the base depend on the threads.
    same |= {"initial": 1e-6, "adapter": adapter, "checkpoint": 0.0}
    return same | {"Hugging Face": computed if hugging_face is None else hugging_face}


# By device and dtype of the base. A GPU adds the order of its atomic sums. bfloat16 keeps 8 bits of
# every partial sum, and some of its routers choose otherwise than the reference's in float32.
TOLERANCES: dict[tuple[str, str], Tolerances] = {
    ("cpu", "float32"): tolerances(1e-5, 1e-2),
    ("cuda", "float32"): tolerances(1e-4, 3e-2),
    ("cpu", "bfloat16"): tolerances(0.1, 0.5, 0.5),
    ("cuda", "bfloat16"): tolerances(0.1, 0.5, 0.5),
}


@dataclass(frozen=True)
class Fault:
    """One tensor that is wrong. `axes`: `{axis: ranks}` over which the table sums this gradient,
    and `split` over which it cuts the tensor, those of one rank left out."""

    name: str
    error: float
    kind: str
    axes: dict[str, int]
    split: dict[str, int]

    @property
    def entry(self) -> str:
        """The entry of the sharding table: `row.B`."""
        return f"{self.kind}.{self.name.rpartition('.')[2]}"

    @property
    def rule(self) -> str:
        """What the table says of it in this layout."""

        def listed(axes: dict[str, int]) -> str:
            return ", ".join(f"{axis} ({ranks} ranks)" for axis, ranks in axes.items())

        summed = f"summed over {listed(self.axes) or 'no ranks here'}"
        return summed + (f", cut over {listed(self.split)}" if self.split else "")


def compare(
    spec: AdapterSpec,
    sizes: Mapping[str, int],
    got: Outcome,
    expected: Outcome,
    tolerance: Tolerances,
) -> list[Check]:
    """All quantities but the checkpoint. `sizes`: ranks of the layout along each axis."""

    def check(quantity: str, error: float) -> Check:
        return Check(quantity, error, tolerance[quantity])

    def tensors(quantity: str, errors: dict[str, float] | None) -> Check:
        if errors is None:
            return Check(quantity, None, tolerance[quantity])
        return tensor_check(spec, sizes, quantity, errors, tolerance[quantity])

    ours, theirs = got.tensors, expected.tensors
    updated = None
    if "trained" in ours and expected.adapter is not None:
        updated = update_errors(ours["trained"], theirs["trained"], expected.adapter)
    return [
        tensors("initial", largest_differences(ours["initial"], theirs["initial"])),
        check("loss", abs(got.loss - expected.loss) / max(1.0, abs(expected.loss))),
        check("logprobs", largest_scaled(got.logprobs or [], expected.logprobs or [])),
        tensors("gradients", gradient_errors(ours["gradients"], theirs["gradients"])),
        check("grad norm", abs(got.grad_norm - expected.grad_norm) / expected.grad_norm),
        tensors("adapter", updated),
    ]


def checkpoint_check(
    spec: AdapterSpec,
    sizes: Mapping[str, int],
    pairs: Sequence[tuple[Outcome, Outcome]],
) -> Check:
    """Each pair: who loaded, and who had saved. The state of both must be equal in every bit."""
    errors: dict[str, float] = {}
    for loaded, saved in pairs:
        for suffix in ("", *(f" {moment}" for moment in MOMENTS)):
            if f"loaded{suffix}" not in loaded.tensors or f"trained{suffix}" not in saved.tensors:
                return Check("checkpoint", None, 0.0)
            theirs = saved.tensors[f"trained{suffix}"]
            for name, ours in loaded.tensors[f"loaded{suffix}"].items():
                errors[name] = errors.get(name, 0.0) + float((ours != theirs[name]).sum())
    return tensor_check(spec, sizes, "checkpoint", errors, 0.0)


def tensor_check(spec, sizes, quantity: str, errors: dict[str, float], tolerance) -> Check:
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    ordered = sorted(wrong, key=lambda name: -_badness(wrong[name]))
    faults = [_fault(spec, sizes, name, wrong[name]) for name in ordered]
    return Check(quantity, max(errors.values(), key=_badness), tolerance, faults)


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _fault(spec: AdapterSpec, sizes: Mapping[str, int], name: str, error: float) -> Fault:
    site, _, tensor = name.rpartition(".")
    kind = kind_of(spec.by_name[site])
    rule = RULES[kind][tensor]
    axes = {axis: sizes[axis] for axis in rule.reduce if sizes[axis] > 1}
    split = {axis: sizes[axis] for _, axis in rule.split if sizes[axis] > 1}
    return Fault(name, error, kind, axes, split)


def gradient_errors(got: Tensors, expected: Tensors) -> dict[str, float]:
    sizes = {name: float(np.linalg.norm(tensor)) for name, tensor in expected.items()}
    floor = FLOOR * max(sizes.values())
    return {name: _norm(got, expected, name) / max(size, floor) for name, size in sizes.items()}


def update_errors(got: Tensors, expected: Tensors, start: Tensors) -> dict[str, float]:
    """Errors of tensors that were updated; one that was not must not be anywhere."""
    errors = {}
    for name in expected:
        size = float(np.linalg.norm(expected[name] - start[name]))
        difference = _norm(got, expected, name)
        errors[name] = difference / size if size else (math.inf if difference else 0.0)
    return errors


def largest_differences(got: Tensors, expected: Tensors) -> dict[str, float]:
    return {name: float(np.abs(got[name] - expected[name]).max()) for name in expected}


def _norm(got: Tensors, expected: Tensors, name: str) -> float:
    return float(np.linalg.norm(got[name] - expected[name]))


def entries(faults: Sequence[Fault]) -> Iterator[tuple[str, list[Fault]]]:
    """Faults by entry of the table, the worst first."""
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.entry, []).append(fault)
    yield from groups.items()
