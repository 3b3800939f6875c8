"""The plan of one run: what every rank holds, what travels, a step's time, what is wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.models.fit import check_blocks, check_layout
from lora_moe_rl.planner import drafts, host
from lora_moe_rl.planner.base import num_parameters
from lora_moe_rl.planner.compute import Flops, Lengths, Roofline, Seconds
from lora_moe_rl.planner.facts import Facts, Format
from lora_moe_rl.planner.hardware import GIB, Efficiency, Hardware
from lora_moe_rl.planner.held import HeldPart, held_parts, shared_bytes
from lora_moe_rl.planner.host import HostMemory, NodeHost
from lora_moe_rl.planner.rollout import EngineRank, engine_rank
from lora_moe_rl.planner.traffic import Refit, Routes, Way, refits, routes
from lora_moe_rl.planner.trainer import RankClass, TrainerMemory
from lora_moe_rl.planner.turns import Turn, turn_problems, turns
from lora_moe_rl.rollout.facts import too_large_for_experts


@dataclass(frozen=True)
class Assumed:
    """What a plan takes for granted beside the config. `weights`: format of the trainer's base;
    `served`: of the engines'."""

    hardware: Hardware
    weights: Format
    served: Format
    lengths: Lengths
    efficiency: Efficiency = field(default_factory=Efficiency)


@dataclass(frozen=True)
class RunPlan:
    """`problems`: why the run would not fit; empty when it does. `hosts`: nodes, by what their
    hosts' memory holds. Of a run that samples nothing
    there are no engine, refits and routes. `held`: what of the base trainer and engines hold once;
    empty with model.held_once=off."""

    facts: Facts
    spec: AdapterSpec
    config: RunConfig
    assumed: Assumed
    classes: list[RankClass]
    engine: EngineRank | None
    refits: list[Refit]
    routes: Routes | None
    flops: Flops
    seconds: Seconds
    problems: list[str]
    held: list[HeldPart]
    hosts: list[NodeHost]

    @property
    def heaviest(self) -> RankClass:
        return max(self.classes, key=lambda c: c.total)

    @property
    def parameters(self) -> int:
        """Parameters of the base as published, without layers that predict further tokens."""
        return num_parameters(self.facts)

    @property
    def adapter_tensors(self) -> int:
        """Tensors as PEFT's files count them: two for each linear, and for each expert's."""
        return sum(2 * (site.num_experts or 1) for site in self.spec)

    @property
    def turns(self) -> list[Turn]:
        """What a GPU holds in each of the turns that are taken on it."""
        if self.engine is None or not self.config.placement.colocated:
            return []
        return turns(self.config, self.classes, self.engine)

    @property
    def warnings(self) -> list[str]:
        """What may not fit: of a host's memory a part is allowances, and not all is known."""
        known = host.warnings(self.hosts, self.assumed.hardware)
        return [*known, *drafts.not_counted(self.config)]

    @property
    def gpus(self) -> tuple[int, int, bool]:
        """What `gpus_of` says."""
        return gpus_of(self.config)


def make(facts: Facts, config: RunConfig, assumed: Assumed) -> RunPlan:
    """Raises ConfigError for a layout that does not divide the model, or an adapter it cannot
    have."""
    check_layout(facts.shape, config, assumed.weights)
    if not config.offline:
        check_blocks(facts.shape, config, assumed.served)
    spec = build_spec(facts, config)
    gpu = assumed.hardware.spec
    classes = TrainerMemory(facts, spec, assumed.weights).classes(config)
    held, node = [], assumed.hardware.gpus_per_node
    if config.model.held_once != "off":
        held = held_parts(facts, config, assumed.weights, node)
        if config.trainer.device == "cuda":
            classes = [
                _without(one, shared_bytes(facts, config, one.stages[0], assumed.weights, node))
                for one in classes
            ]
    roofline = Roofline(facts, spec, assumed.lengths, assumed.weights)
    heaviest = max(classes, key=lambda c: c.total)
    engine, moved, decisions, refit = None, [], None, 0.0
    if not config.offline:
        engine = engine_rank(facts, spec, config, assumed.served, gpu)
        moved = refits(facts, _ways(facts, config), config, assumed.served, gpu, assumed.efficiency)
        refit = next(r for r in moved if r.way == config.adapter.expert_layout).seconds
        algorithm = config.algorithm
        samples = algorithm.prompts_per_step * algorithm.group_size
        decisions = routes(facts.shape, samples * assumed.lengths.sample)
    hardware = (gpu, node, assumed.efficiency)
    return RunPlan(
        facts,
        spec,
        config,
        assumed,
        classes,
        engine,
        moved,
        decisions,
        roofline.of(config.trainer.recompute),
        roofline.seconds(config, heaviest, engine, refit, hardware),
        [
            *problems(config, classes, engine, assumed.hardware),
            *_not_held(config, held),
            *not_served(config, spec),
        ],
        held,
        HostMemory(
            config,
            classes,
            engine,
            decisions,
            assumed.lengths,
            assumed.served,
            spec.num_parameters,
            held,
            assumed.weights,
        ).nodes(gpus_of(config), assumed.hardware.gpus_per_node),
    )


def _without(rank: RankClass, shared: int) -> RankClass:
    """A class of trainer ranks that hold so much less of the base."""
    return replace(rank, memory=rank.memory | {"base": rank.memory["base"] - shared})


def _not_held(config: RunConfig, held: list[HeldPart]) -> list[str]:
    """Of a run that is to hold its experts once and cannot."""
    whys = [part.why for part in held if part.part == "experts" and part.why]
    return [f"model.held_once=on: {why}" for why in whys if config.model.held_once == "on"]


def build_spec(facts: Facts, config: RunConfig) -> AdapterSpec:
    return AdapterSpec.build(facts.shape, config.adapter, servable=config.serves_adapters)


def _ways(facts: Facts, config: RunConfig) -> dict[Way, AdapterSpec]:
    """The adapter in its own expert layout and, where there is one, in the other."""
    ways: dict[Way, AdapterSpec] = {}
    for way in ("per_expert", "shared_outer"):
        if way == "shared_outer" and config.adapter.starts_from_base:
            continue
        adapter = config.adapter.model_copy(update={"expert_layout": way})
        targets = [*AdapterSpec.build(facts.shape, config.adapter, servable=False)]
        if way == "per_expert" or any(site.num_experts for site in targets):
            ways[way] = build_spec(facts, config.model_copy(update={"adapter": adapter}))
    return ways


def gpus_of(config: RunConfig) -> tuple[int, int, bool]:
    """(GPUs for the trainer, for the engines, whether they share them)."""
    trainer, rollout = config.trainer, config.rollout
    each = rollout.ranks if rollout.gpus_per_engine is None else rollout.gpus_per_engine
    mine = math.ceil(trainer.world_size * trainer.gpus_per_rank)
    if config.offline:
        return mine, 0, False
    if config.placement.colocated:
        return mine, rollout.engines * rollout.ranks, True
    theirs = math.ceil(rollout.engines * each)
    share = rollout.ranks == 1 and trainer.gpus_per_rank + each <= 1
    if share:
        together = trainer.world_size * trainer.gpus_per_rank + rollout.engines * each
        return math.ceil(together), math.ceil(together), True
    return mine, theirs, False


def problems(
    config: RunConfig,
    classes: Sequence[RankClass],
    engine: EngineRank | None,
    hardware: Hardware,
) -> list[str]:
    """One sentence for each thing that does not fit, with numbers and a way out."""
    found: list[str] = []
    heaviest = max(classes, key=lambda c: c.total)
    memory = hardware.spec.memory
    mine, theirs, shared = gpus_of(config)
    needed = mine if shared else mine + theirs
    if needed > hardware.gpus:
        rollout = config.rollout
        size = "dp" if rollout.dp > 1 else "tp"
        engines = f" or rollout.engines={rollout.engines} * rollout.{size}={rollout.ranks}"
        found.append(
            f"the run needs {needed} GPUs (trainer {mine}, engines {theirs}) and there are "
            f"{hardware.gpus}; lower trainer.world_size={config.trainer.world_size}"
            f"{engines if theirs else ''}"
        )
    for key, tp in (("trainer.tp", config.trainer.tp), ("rollout.tp", config.rollout.tp)):
        if tp > hardware.gpus_per_node:
            found.append(
                f"{key}={tp} ranks stand on one node, and a node has {hardware.gpus_per_node} "
                f"GPUs; use {key}={hardware.gpus_per_node} or less, or --gpus-per-node"
            )
    there = config.rollout.ranks // config.rollout.nodes
    if config.rollout.dp > 1 and there > hardware.gpus_per_node:
        found.append(
            f"rollout.dp={config.rollout.dp} with rollout.nodes={config.rollout.nodes} has {there} "
            f"ranks of an engine on one node, and a node has {hardware.gpus_per_node} GPUs; raise "
            "rollout.nodes, or --gpus-per-node"
        )
    total = heaviest.total / GIB
    if total > memory:
        largest, size = heaviest.largest
        found.append(
            f"a trainer rank of {heaviest.name} needs {total:.1f} GiB of {memory:g}: most of it is "
            f"its {largest} ({size / GIB:.1f} GiB); {_way_out(config, largest)}"
        )
    if engine is None:
        return found
    if config.placement.colocated:
        found += turn_problems(config, turns(config, classes, engine), memory)
        shared = False
    found += _of_engine(config, engine, total, memory, shared)
    return found + _not_read(config, classes, engine, memory)


def _of_engine(
    config: RunConfig, engine: EngineRank, total: float, memory: float, shared: bool
) -> list[str]:
    """`problems` of an engine rank, beside a trainer rank of `total` GiB if they share a GPU."""
    found = []
    budget = engine.budget / GIB
    if shared and total + budget > memory and total <= memory:
        found.append(
            f"a trainer rank of {total:.1f} GiB and an engine of {budget:.1f} GiB "
            f"(rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization:g}) share a "
            f"GPU of {memory:g} GiB; lower the engine's share to "
            f"{max(0.0, math.floor((memory - total) / memory * 100) / 100):.2f}"
        )
    if engine.sequences < 1:
        found.append(
            f"an engine rank has {engine.kv_cache / GIB:.1f} GiB left for the KV cache of "
            f"{budget:.1f} GiB (weights {engine.weights / GIB:.1f}, adapter slots "
            f"{engine.slots / GIB:.1f}), and one sequence of model.max_length="
            f"{config.model.max_length} takes {engine.kv_token * config.model.max_length / GIB:.1f}"
            f"; {_engine_way_out(config, engine)}"
        )
    return found


def _not_read(
    config: RunConfig, classes: Sequence[RankClass], engine: EngineRank, memory: float
) -> list[str]:
    """With refit.transport=nixl an engine rank reads the trainer ranks' parts, one at a time, into
    a room beside vLLM's share."""
    room = max(one.memory["refit"] for one in classes)
    if config.refit.transport != "nixl" or engine.budget + room <= memory * GIB:
        return []
    share = math.floor((memory - room / GIB) / memory * 100) / 100
    return [
        f"with refit.transport=nixl an engine rank reads a trainer rank's part of a version, "
        f"{room / GIB:.2f} GiB, into a room beside vLLM's {engine.budget / GIB:.1f} of {memory:g} "
        f"GiB; lower rollout.gpu_memory_utilization={config.rollout.gpu_memory_utilization:g} to "
        f"{share:.2f}"
    ]


def not_served(config: RunConfig, spec: AdapterSpec) -> list[str]:
    """What vLLM's kernels on GPUs do not take."""
    if config.offline or config.refit.mode == "merged":
        return []
    why = too_large_for_experts(spec, config.rollout)
    return [why] if why else []


def _way_out(config: RunConfig, largest: str) -> str:
    if largest == "base":
        return "raise trainer.pp, trainer.ep or trainer.tp, over more GPUs"
    if largest in ("adapter", "gradients", "optimizer"):
        return (
            "lower adapter.rank or adapter.expert_rank, or use adapter.expert_layout=shared_outer"
        )
    if config.trainer.recompute == "none" and not config.trainer.offloads_activations:
        return "set trainer.recompute=full, or lower trainer.micro_batch_tokens"
    return (
        "lower trainer.micro_batch_tokens and model.max_length, or raise trainer.tp or trainer.cp"
    )


def _engine_way_out(config: RunConfig, engine: EngineRank) -> str:
    rollout = config.rollout
    if engine.slots > engine.weights / 4 and rollout.tp > 1 and not rollout.ep:
        return "set rollout.ep=true or rollout.fully_sharded=true, which cut adapter slots"
    if rollout.dp > 1:
        return "raise rollout.dp or rollout.gpu_memory_utilization, or lower refit.slots"
    return "raise rollout.tp or rollout.gpu_memory_utilization, or lower refit.slots"
