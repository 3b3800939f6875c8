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
from dataclasses import asdict
from typing import Any

import torch

from lora_moe_rl.errors import RefitError
from lora_moe_rl.kernels.merge.rounding import Rounding
from lora_moe_rl.refit import parts, transports
from lora_moe_rl.refit.merged_base import Base
from lora_moe_rl.refit.merged_modules import (
    EXPERTS,
    Buffers,
    Merge,
    Module,
    base_linear,
    base_shards,
    find_arriving,
    in_partitions,
)
from lora_moe_rl.refit.merged_vllm import Weights
from lora_moe_rl.refit.parts import Entry, SentPart
from lora_moe_rl.refit.receiver import Worker, answer
from lora_moe_rl.rollout.facts import fused_parts
from lora_moe_rl.telemetry import peak


class MergedReceiver(Worker):
    """Methods of every vLLM worker. `_refit_staged`: version and buffers between stage and commit;
    `_refit_version`: what the weights hold, None for the base."""

    _refit_staged: tuple[int, Buffers] | None = None
    _refit_version: int | None = None
    _refit_touched = False

    @answer
    def refit_prepare(
        self, layouts_json: str, channel_json: str, rounding: Rounding, seed: int
    ) -> dict[str, Any]:
        """Checks vLLM's internals, the base's files and what is going to arrive against each other,
        and that what we would write of the base is what vLLM has loaded. `rounding` and `seed`: of
        merged weights (`refit/merged_modules.py`)."""
        self._refit_rounding: Rounding = rounding
        self._refit_seed = seed
        if not hasattr(self, "_refit_weights"):
            self._refit_base = Base(self.model_runner.model_config.model)
            self._refit_weights = Weights(self.model_runner)
        self._refit_layouts = {layout.source: layout for layout in parts.from_json(layouts_json)}
        self._refit_modules = self._refit_find_modules()
        channel = transports.from_json(channel_json)
        transports.check(channel.settings)
        self._refit_incoming = channel.incoming(self.rank)
        if not self._refit_touched:
            self._refit_check_layout()
        return {"modules": [module.path for module in self._refit_modules], "slots": 0}

    def _refit_linear_holds(self, module: Module, weights: list[tuple[str, torch.Tensor]]) -> bool:
        pieces = in_partitions(self._refit_base, module, weights)
        return self._refit_weights.linear_holds(module.path, pieces)

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
                    name: find_arriving(f"layers.{layer}.{name}", base, layer, name, pieces, local)
                    for name in adapted
                }
                modules.append(Module(path, layer, tuple(names), arriving))
        if sites:
            raise RefitError(f"{self._refit_base.directory} has no {', '.join(sorted(sites))}")
        return modules

    def _refit_check_layout(self) -> None:
        """The base as we would write it is what vLLM holds: of the first and the last layer with
        experts the first and the last expert of this worker, and every other linear of the first
        and the last layer. So it is known before training that both can be read back."""
        experts = [module for module in self._refit_modules if module.is_experts]
        for module in _ends(experts):
            held = self._refit_weights.experts(module.path)
            for expert in {min(held.places), max(held.places)}:
                if not held.holds(expert, base_shards(self._refit_base, module, expert)):
                    raise RefitError(
                        f"{module.path}: what vLLM holds of expert {expert} is not what "
                        f"refit.mode=merged would write; it does not know the layout of "
                        f"{held.method.unquantized_backend}"
                    )
        linears = [module for module in self._refit_modules if not module.is_experts]
        layers = {module.layer for module in _ends(linears)}
        for module in linears:
            base = base_linear(self._refit_base, module) if module.layer in layers else None
            if base and not self._refit_linear_holds(module, base):
                raise RefitError(
                    f"{module.path}: what can be read back of vLLM is not what refit.mode=merged "
                    f"would write of {', '.join(name for name, _ in base)}"
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
            whole = torch.as_tensor(buffer).view(getattr(torch, layout.dtype))
            for i in mine:
                _check_finite(layout.entries[i].tensor, layout.entries[i].view(whole), version)
            buffers[part.source] = whole
        return buffers

    @answer
    def refit_commit(self, version: int) -> dict[str, Any]:
        """Makes the staged version the model's weights, and says what arrived of its change. If it
        fails, they are of no version."""
        if self._refit_staged is None or self._refit_staged[0] != version:
            raise RefitError(f"adapter version {version} is not staged")
        started = time.perf_counter()
        (_, buffers), self._refit_staged = self._refit_staged, None
        self._refit_version, self._refit_touched = None, True
        merge = self._refit_merge(version, buffers)
        for module in self._refit_modules:
            try:
                self._refit_change(module, merge)
            except (RuntimeError, ValueError, KeyError) as error:  # vLLM's
                raise RefitError(f"{module.path}: {error!r}") from error
        self._refit_version = version
        arrived = {name: asdict(one) for name, one in merge.arrived.items()}
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "arrived": arrived, "peak_gib": peak.gib()}

    def _refit_merge(self, version: int, buffers: Buffers) -> Merge:
        weights = self._refit_weights
        return Merge(
            *(version, buffers, self._refit_base, weights.dtype, weights.device),
            *(self._refit_rounding, self._refit_seed),
        )

    def _refit_change(self, module: Module, merge: Merge) -> None:
        if module.is_experts:
            experts = self._refit_weights.experts(module.path)
            for expert, shards in merge.experts(module, experts):
                experts.write(expert, shards)
        else:
            self._refit_weights.load_linear(module.path, merge.linear(module))

    @answer
    def refit_compare(self, version: int, sent_json: str) -> dict[str, Any]:
        """The modules that do not hold what was sent, in all of the model that is adapted."""
        if self._refit_version != version:
            raise RefitError(f"the weights are not of adapter version {version}")
        merge = self._refit_merge(version, self._refit_open(version, sent_json))
        modules = self._refit_modules
        return {"differing": [m.path for m in modules if not self._refit_holds(m, merge)]}

    def _refit_holds(self, module: Module, merge: Merge) -> bool:
        if not module.is_experts:
            return self._refit_linear_holds(module, merge.linear(module))
        experts = self._refit_weights.experts(module.path)
        return all(experts.holds(*one) for one in merge.experts(module, experts))

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


def _ends(modules: list[Module]) -> list[Module]:
    """The first and the last."""
    return modules[:1] + modules[1:][-1:]


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


def _check_finite(tensor: str, values: torch.Tensor, version: int) -> None:
    if not torch.isfinite(values).all():
        raise RefitError(
            f"adapter version {version}: {tensor} arrived with NaN or infinite values; the weights "
            "are as they were"
        )
