"""A version merged, module by module: what arrived of an adapter, on top of the base's weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from lora_moe_rl.errors import RefitError
from lora_moe_rl.kernels.merge import merge_rounded
from lora_moe_rl.kernels.merge.rounding import Arrived, Rounding, seed_of
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.refit.parts import Entry
from lora_moe_rl.refit.plan import Box

if TYPE_CHECKING:
    from lora_moe_rl.refit.merged_vllm import Experts

Buffers = Mapping[int, torch.Tensor]  # of each trainer rank, in the adapter's dtype
EXPERTS = {"experts.gate": "w1", "experts.up": "w3", "experts.down": "w2"}


@dataclass(frozen=True)
class Arriving:
    """What reaches this worker of a canonical tensor: `box` of it. `pieces`: (trainer rank, entry
    of its part)."""

    box: Box
    pieces: tuple[tuple[int, Entry], ...]

    def assemble(self, buffers: Buffers) -> torch.Tensor:
        views = [(entry.box, entry.view(buffers[source])) for source, entry in self.pieces]
        if len(views) == 1:
            return views[0][1]
        whole = views[0][1].new_empty(self.box.shape)
        for box, view in views:
            whole[box.within(self.box)] = view
        return whole


@dataclass(frozen=True)
class Module:
    """A module of vLLM of which something is adapted: our modules in it, and those of their tensors
    that arrive, as `{module: (A, B)}`."""

    path: str
    layer: int
    parts: tuple[str, ...]
    arriving: Mapping[str, tuple[Arriving, Arriving]]

    @property
    def is_experts(self) -> bool:
        return self.parts[0] in EXPERTS


@dataclass
class Merge:
    """One version: its adapter in `buffers`, merged into `base` and rounded to `dtype`.

    Random numbers of a stochastic rounding depend on `seed`, the version and the weight's name
    alone: every worker, and an engine that is started anew, makes the same bytes. `arrived` grows
    with what is merged: by module and, of experts, those of this worker.
    """

    version: int
    buffers: Buffers
    base: Base
    dtype: torch.dtype
    device: torch.device
    rounding: Rounding
    seed: int
    arrived: dict[str, Arrived] = field(default_factory=dict)

    def linear(self, module: Module) -> list[tuple[str, torch.Tensor]]:
        """All of a module's weights, and biases, under the checkpoint's names."""
        result = dict(base_linear(self.base, module))
        for name, pair in module.arriving.items():
            A, B = (tensor.assemble(self.buffers) for tensor in pair)
            path = self.base.name(module.layer, name)
            weight, group = f"{path}.weight", f"layers.{module.layer}.{name}"
            result[weight] = self._merged(result[weight], A, B, path, group)
        return list(result.items())

    def experts(
        self, module: Module, experts: Experts
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Each expert of this worker, its gate, up and down under vLLM's names."""
        adapters = {
            name: tuple(tensor.assemble(self.buffers) for tensor in pair)
            for name, pair in module.arriving.items()
        }
        first, last = min(experts.places), max(experts.places)
        for expert in experts.places:
            shards = base_shards(self.base, module, expert)
            for name, pair in adapters.items():
                A, B = (m[expert - first] if m.dim() == 3 else m for m in pair)
                path = self.base.name(module.layer, name, expert)
                group = f"layers.{module.layer}.{name} of experts {first} to {last}"
                shards[EXPERTS[name]] = self._merged(shards[EXPERTS[name]], A, B, path, group)
            yield expert, shards

    def _merged(
        self, weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor, path: str, group: str
    ) -> torch.Tensor:
        """`weight + B A`. The base is rounded to the model's dtype first, as trainer and engine
        hold it. Raises RefitError if the sum overflows."""
        weight = weight.to(self.device, self.dtype)
        seed = seed_of(self.seed, self.version, path)
        A, B = A.to(self.device), B.to(self.device)
        merged, arrived = merge_rounded(weight, A, B, 1.0, self.dtype, self.rounding, seed)
        if not torch.isfinite(merged).all():
            raise RefitError(
                f"{path}: its weight with the adapter merged in overflows {self.dtype}"
            )
        self.arrived.setdefault(group, Arrived()).add(arrived)
        return merged


def base_linear(base: Base, module: Module) -> list[tuple[str, torch.Tensor]]:
    """All of a module's weights, and biases, of the base, under the checkpoint's names."""
    result = []
    for name in module.parts:
        path, bias = base.name(module.layer, name), base.bias(module.layer, name)
        result.append((f"{path}.weight", base.weight(module.layer, name)))
        if bias is not None:
            result.append((f"{path}.bias", bias))
    return result


def in_partitions(
    base: Base, module: Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All of a module's weights, one for each of vLLM's partitions: a linear with several outputs
    side by side is as many of them."""
    blocks = {
        f"{base.name(module.layer, name)}.weight": base.shape.blocks(name) for name in module.parts
    }
    for name, value in weights:
        for number, piece in enumerate(value.split(blocks.get(name) or len(value))):
            yield f"{number}.{name}", piece


def base_shards(base: Base, module: Module, expert: int) -> dict[str, torch.Tensor]:
    """One expert's gate, up and down of the base, under vLLM's names."""
    return {EXPERTS[name]: base.weight(module.layer, name, expert) for name in module.parts}


def find_arriving(
    site: str,
    base: Base,
    layer: int,
    module: str,
    pieces: Mapping[str, list[tuple[int, Entry]]],
    local: range | None,
) -> tuple[Arriving, Arriving]:
    """Raises RefitError when the pieces of a site do not make up the whole of A and of B as the
    model has them (of routed experts: `local`)."""
    in_features, out_features, _ = base.shape.modules(layer)[module]
    found = {m: pieces.get(f"{site}.{m}", []) for m in ("A", "B")}
    # Rows of A, columns of B
    ranks = {
        m: max((e.box.start[i] + e.box.shape[i] for _, e in found[m]), default=0)
        for m, i in (("A", -2), ("B", -1))
    }
    result = []
    for matrix, shape in (("A", (ranks["A"], in_features)), ("B", (out_features, ranks["A"]))):
        boxes = [entry.box for _, entry in found[matrix]]
        start = (0, 0)
        if local is not None and boxes and len(boxes[0].shape) == 3:
            start, shape = (local.start, 0, 0), (len(local), *shape)
        whole = Box(start, shape)
        inside = all(whole.common(box) == box for box in boxes)
        if not inside or sum(box.size for box in boxes) != whole.size:
            raise RefitError(
                f"{site}.{matrix}: the boxes {[(b.start, b.shape) for b in boxes]} are planned to "
                f"arrive, which are not all of {whole.shape} from {whole.start} on"
            )
        result.append(Arriving(whole, tuple(found[matrix])))
    return result[0], result[1]
