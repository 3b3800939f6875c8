"""Names of quantised weights in a checkpoint: without torch, as a run is looked at."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_moe_rl.kernels.dequant import Form

# Names of a linear's tensors behind its path: (packed values, scales, shape or None).
TENSORS: dict[Form, tuple[str, str, str | None]] = {
    "int4": ("weight_packed", "weight_scale", "weight_shape"),
    "fp8": ("weight", "weight_scale_inv", None),
    "mxfp4": ("weight_packed", "weight_scale", None),
}
_BESIDE = {name for names in TENSORS.values() for name in names if name}


def form_of(path: str, names: Collection[str]) -> Form | None:
    """How a checkpoint with these `names` stores the linear at `path`; None: not quantised."""
    for form, needed in TENSORS.items():
        if all(f"{path}.{name}" in names for name in needed if name):
            return form
    return None


def weight_of(name: str) -> str:
    """The weight that a tensor of a checkpoint belongs to."""
    path, _, last = name.rpartition(".")
    return f"{path}.weight" if last in _BESIDE else name


def of_expert(name: str, names: Collection[str]) -> bool:
    """Whether a tensor belongs to a routed expert's quantised linear."""
    if not re.search(r"\.experts\.\d+\.", name):
        return False
    return form_of(name.rpartition(".")[0], names) is not None
