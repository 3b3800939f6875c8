"""The receiving side of a merged refit: base weights with the adapter merged in, made in place.

`MergedReceiver` is a vLLM worker extension of engines without LoRA, as `refit/receiver.py` is of
those with it. What travels is the adapter alone, and every worker takes the whole of it. A version
comes in two steps:

    refit_stage   check every tensor; no weight is touched
    refit_commit  weight by weight: read the base, merge, give it to vLLM

Between them no request may run: weights change in place. What of vLLM it touches stands in
`refit/merged_vllm.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lora_moe_rl.errors import RefitError
from lora_moe_rl.kernels.merge import merge_delta_
from lora_moe_rl.refit import parts, transports
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.refit.merged_vllm import Experts, Weights
from lora_moe_rl.refit.parts import Entry, SentPart
from lora_moe_rl.refit.plan import Box
from lora_moe_rl.refit.receiver import answer
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
from lora_moe_rl.rollout.facts import fused_parts

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


class MergedReceiver:
    """Methods of every vLLM worker. `_refit_staged`: version and buffers between stage and commit;
    `_refit_version`: what the weights hold, None for the base."""

    _refit_staged: tuple[int, Buffers] | None = None
    _refit_version: int | None = None
    _refit_touched = False

    @answer
    def refit_prepare(
        self, layouts_json: str, channel_json: str = SHARED_MEMORY.to_json()
    ) -> dict[str, Any]:
        """Checks vLLM's internals, the base's files and what is going to arrive against each other,
        and that what we would write of the base is what vLLM has loaded."""
        if not hasattr(self, "_refit_weights"):
            self._refit_base = Base(self.model_runner.model_config.model)
            self._refit_weights = Weights(self.model_runner)
        self._refit_layouts = {layout.source: layout for layout in parts.from_json(layouts_json)}
        self._refit_modules = self._refit_find_modules()
        self._refit_incoming = transports.from_json(channel_json).incoming(self.rank)
        if not self._refit_touched:
            self._refit_check_layout()
        return {"modules": [module.path for module in self._refit_modules], "slots": 0}

    def _refit_find_modules(self) -> list[Module]:
        base, weights = self._refit_base, self._refit_weights
        pieces: dict[str, list[tuple[int, Entry]]] = {}
        for layout in self._refit_layouts.values():
            if getattr(torch, layout.dtype) != weights.dtype:
                raise RefitError(
                    f"adapters are sent in {layout.dtype}, the weights are {weights.dtype}"
                )
            for entry in layout.entries:
                if self.rank in entry.targets:
                    pieces.setdefault(entry.tensor, []).append((layout.source, entry))
        sites = {name.rpartition(".")[0] for name in pieces}
        modules = []
        for layer in range(base.shape.num_layers):
            for path, names in fused_parts(base.shape, layer).items():
                adapted = [name for name in names if f"layers.{layer}.{name}" in sites]
                sites -= {f"layers.{layer}.{name}" for name in adapted}
                if not adapted:
                    continue
                local = _check_vllm(weights, path, names)
                for name in names:
                    base.check(layer, name)
                arriving = {
                    name: _arriving(f"layers.{layer}.{name}", base, layer, name, pieces, local)
                    for name in adapted
                }
                modules.append(Module(path, layer, tuple(names), arriving))
        if sites:
            raise RefitError(f"{self._refit_base.directory} has no {', '.join(sorted(sites))}")
        return modules

    def _refit_check_layout(self) -> None:
        """The base's experts as we would write them are what vLLM holds: of the first and the last
        layer the first and the last expert of this worker."""
        modules = [module for module in self._refit_modules if module.is_experts]
        for module in {id(m): m for m in (modules[:1] + modules[-1:])}.values():
            experts = self._refit_weights.experts(module.path)
            for expert in {min(experts.places), max(experts.places)}:
                if not experts.holds(expert, self._refit_shards(module, expert, {})):
                    raise RefitError(
                        f"{module.path}: what vLLM holds of expert {expert} is not what "
                        f"refit.mode=merged would write; it does not know the layout of "
                        f"{experts.method.unquantized_backend}"
                    )

    @answer
    def refit_stage(self, version: int, sent_json: str) -> dict[str, Any]:
        """Checks every tensor of a version."""
        started = time.perf_counter()
        self._refit_staged = None
        self._refit_base.check_unchanged()
        self._refit_staged = (version, self._refit_open(version, sent_json))
        return {"seconds": time.perf_counter() - started}

    def _refit_open(self, version: int, sent_json: str) -> Buffers:
        sent = [SentPart(**fields) for fields in json.loads(sent_json)]
        parts.check_sent(list(self._refit_layouts.values()), sent, version)
        buffers = {}
        for part in sent:
            layout = self._refit_layouts[part.source]
            mine = [i for i, entry in enumerate(layout.entries) if self.rank in entry.targets]
            buffer = self._refit_incoming.open(layout, part)
            parts.check_received(layout, part, buffer, mine)
            whole = torch.from_numpy(buffer).view(getattr(torch, layout.dtype))
            for i in mine:
                _check_finite(layout.entries[i].tensor, layout.entries[i].view(whole), version)
            buffers[part.source] = whole
        return buffers

    @answer
    def refit_commit(self, version: int) -> dict[str, Any]:
        """Makes the staged version the model's weights. If it fails, they are of no version."""
        if self._refit_staged is None or self._refit_staged[0] != version:
            raise RefitError(f"adapter version {version} is not staged")
        started = time.perf_counter()
        (_, buffers), self._refit_staged = self._refit_staged, None
        self._refit_version, self._refit_touched = None, True
        for module in self._refit_modules:
            try:
                self._refit_change(module, buffers)
            except (RuntimeError, ValueError, KeyError) as error:  # vLLM's
                raise RefitError(f"{module.path}: {error!r}") from error
        self._refit_version = version
        return {"seconds": time.perf_counter() - started}

    def _refit_change(self, module: Module, buffers: Buffers) -> None:
        if module.is_experts:
            experts = self._refit_weights.experts(module.path)
            for expert, shards in self._refit_experts(module, experts, buffers):
                experts.write(expert, shards)
        else:
            self._refit_weights.load_linear(module.path, self._refit_linear(module, buffers))

    @answer
    def refit_compare(self, version: int, sent_json: str) -> dict[str, Any]:
        """The expert layers that do not hold what was sent. Of other linears an engine on the CPU
        holds packed forms alone, which cannot be read back."""
        if self._refit_version != version:
            raise RefitError(f"the weights are not of adapter version {version}")
        buffers = self._refit_open(version, sent_json)
        differing = []
        for module in self._refit_modules:
            if module.is_experts:
                experts = self._refit_weights.experts(module.path)
                pairs = self._refit_experts(module, experts, buffers)
                if not all(experts.holds(expert, shards) for expert, shards in pairs):
                    differing.append(module.path)
        return {"differing": differing}

    @answer
    def refit_drop(self, version: int) -> dict[str, Any]:
        """Forgets a staged version."""
        staged = self._refit_staged is not None and self._refit_staged[0] == version
        if staged:
            self._refit_staged = None
        return {"dropped": staged}

    @answer
    def refit_state(self) -> dict[str, Any]:
        """The version of the weights."""
        return {"versions": [] if self._refit_version is None else [self._refit_version]}

    def _refit_linear(self, module: Module, buffers: Buffers) -> list[tuple[str, torch.Tensor]]:
        """All of a module's weights, and biases, under the checkpoint's names."""
        base, result = self._refit_base, []
        for name in module.parts:
            weight = base.weight(module.layer, name)
            if name in module.arriving:
                A, B = (tensor.assemble(buffers) for tensor in module.arriving[name])
                weight = self._refit_merged(weight, A, B, f"layers.{module.layer}.{name}")
            result.append((f"{base.name(module.layer, name)}.weight", weight))
            bias = base.bias(module.layer, name)
            if bias is not None:
                result.append((f"{base.name(module.layer, name)}.bias", bias))
        return result

    def _refit_experts(
        self, module: Module, experts: Experts, buffers: Buffers
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        adapters = {
            name: tuple(tensor.assemble(buffers) for tensor in pair)
            for name, pair in module.arriving.items()
        }
        first = min(experts.places)
        for expert in experts.places:
            one = {
                name: tuple(m[expert - first] if m.dim() == 3 else m for m in pair)
                for name, pair in adapters.items()
            }
            yield expert, self._refit_shards(module, expert, one)

    def _refit_shards(
        self, module: Module, expert: int, adapters: Mapping[str, tuple[torch.Tensor, ...]]
    ) -> dict[str, torch.Tensor]:
        """One expert's gate, up and down under vLLM's names; `adapters`: its A and B of each."""
        shards = {}
        for name in module.parts:
            weight = self._refit_base.weight(module.layer, name, expert)
            if name in adapters:
                where = f"layers.{module.layer}.{name} of expert {expert}"
                weight = self._refit_merged(weight, *adapters[name], where)
            shards[EXPERTS[name]] = weight
        return shards

    def _refit_merged(
        self, weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor, where: str
    ) -> torch.Tensor:
        """`weight + B A`, rounded once to the model's dtype. Raises RefitError if it overflows."""
        device, dtype = self._refit_weights.device, self._refit_weights.dtype
        weight = weight.to(device)
        if weight.dtype != dtype:
            weight = weight.float()
        merged = merge_delta_(weight, A.to(device), B.to(device), 1.0).to(dtype)
        if not torch.isfinite(merged).all():
            raise RefitError(f"{where}: its weight with the adapter merged in overflows {dtype}")
        return merged


def _check_vllm(weights: Weights, path: str, names: list[str]) -> range | None:
    """The experts that a worker holds of a module; None for a linear."""
    if names[0] not in EXPERTS:
        weights.check_linear(path)
        return None
    places = weights.experts(path).places
    local = range(min(places), max(places) + 1)
    if list(places) != list(local):
        raise RefitError(
            f"{path}: vLLM gives this worker the experts {list(places)}, and refit.mode=merged "
            "needs neighbours: leave the placement linear"
        )
    return local


def _arriving(
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


def _check_finite(tensor: str, values: torch.Tensor, version: int) -> None:
    if not torch.isfinite(values).all():
        raise RefitError(
            f"adapter version {version}: {tensor} arrived with NaN or infinite values; the weights "
            "are as they were"
        )
