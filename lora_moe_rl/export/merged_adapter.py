"""The adapter of a merge: checked once, then read layer by layer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import xxhash

from lora_moe_rl.adapters.spec import AdapterSpec, Site
from lora_moe_rl.errors import AdapterError
from lora_moe_rl.export.merged_plan import MergeStep
from lora_moe_rl.export.merged_weights import Factors

SHOWN = 5


class Adapter:
    """Canonical tensors of `spec`, those of one layer in memory at a time.

    Raises AdapterError for tensors that are missing or not of the spec, of another shape, or not
    finite. `digest` is of all of them and of their scales.
    """

    def __init__(self, spec: AdapterSpec, tensors: Mapping[str, np.ndarray]):
        self.tensors = tensors
        self.layer: int | None = None
        self.held: dict[str, torch.Tensor] = {}
        for said, names in (
            ("lacks", spec.tensor_shapes.keys() - tensors.keys()),
            ("has no site for", tensors.keys() - spec.tensor_shapes.keys()),
        ):
            if names:
                raise AdapterError(
                    f"the adapter {said} {', '.join(sorted(names)[:SHOWN])}"
                    + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
                )
        digest = xxhash.xxh3_128()
        for site in spec:
            digest.update(f"{site.name} {site.scale!r}".encode())
            for matrix, shape in (("A", site.shape_A), ("B", site.shape_B)):
                digest.update(_checked(f"{site.name}.{matrix}", tensors, shape))
        self.digest = digest.hexdigest()

    def factors(self, step: MergeStep) -> Factors | None:
        """A, B of the step's rows and the scale, or None when nothing is added to them."""
        if step.part is None:
            return None
        site, expert = step.part.site, step.part.expert
        A, B = self._tensor(site, "A", expert), self._tensor(site, "B", expert)
        first = step.first - step.part.first_row
        return A, B[first : first + step.rows], site.scale

    def _tensor(self, site: Site, matrix: str, expert: int | None) -> torch.Tensor:
        if site.layer != self.layer:
            self.layer, self.held = site.layer, {}
        name = f"{site.name}.{matrix}"
        if name not in self.held:
            array = np.require(self.tensors[name], np.float32, ("C", "W"))
            self.held[name] = torch.from_numpy(array)
        whole = self.held[name]
        return whole if expert is None or site.shared == matrix else whole[expert]


def _checked(name: str, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    array = np.ascontiguousarray(tensors[name], dtype=np.float32)
    if array.shape != shape:
        raise AdapterError(f"{name} is {list(array.shape)}, and its site takes {list(shape)}")
    if not np.isfinite(array).all():
        raise AdapterError(f"{name} holds NaN or infinity: such an adapter cannot be merged")
    return array
