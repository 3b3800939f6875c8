"""Layouts of a run on a number of GPUs: those that divide the model and fit, by estimated time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RolloutConfig, RunConfig, TrainerConfig
from lora_moe_rl.config.sharing import gpus_together
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.fit import can_share, cut_block
from lora_moe_rl.planner.compute import Roofline, Seconds
from lora_moe_rl.planner.facts import Facts
from lora_moe_rl.planner.hardware import GIB
from lora_moe_rl.planner.plan import Assumed, build_spec
from lora_moe_rl.planner.rollout import EngineRank, engine_rank, with_budget
from lora_moe_rl.planner.trainer import RankClass, TrainerMemory, micro_batches
from lora_moe_rl.planner.turns import turns

MAX_PP = 32
TPS = (1, 2, 4, 8)
ENGINE_TPS = (1, 2, 4, 8, 16, 32, 64)
SPLITS = 16  # shares of the GPUs that engines are tried with
# What proposals leave free of a trainer rank's GPU: the plan is 12 % below the two published
# figures of a rank's memory (planner/published.py).
MARGIN = 0.15
LAYOUT_KEYS = ("world_size", "tp", "pp", "ep", "etp", "vpp")
# All keys that a search sets, by section.
SEARCHED = {
    "trainer": (*LAYOUT_KEYS, "recompute", "gpus_per_rank"),
    "rollout": (
        "engines",
        "tp",
        "dp",
        "nodes",
        "ep",
        "fully_sharded",
        "gpus_per_engine",
        "gpu_memory_utilization",
    ),
}


@dataclass(frozen=True)
class Proposal:
    """A layout that divides and fits. `seconds` without the refit, which hardly differs."""

    config: RunConfig
    heaviest: RankClass
    engine: EngineRank
    seconds: Seconds
    shared: bool

    @property
    def settings(self) -> dict[str, object]:
        """The keys of the config that make this layout."""
        trainer, rollout = self.config.trainer, self.config.rollout
        found: dict[str, object] = {
            f"trainer.{key}": getattr(trainer, key)
            for key in ("world_size", "tp", "pp", "ep", "recompute")
        }
        found |= {"rollout.engines": rollout.engines, **engine_settings(rollout)}
        if self.shared:
            found |= {
                "trainer.gpus_per_rank": trainer.gpus_per_rank,
                "rollout.gpus_per_engine": rollout.gpus_per_engine,
            }
        return found | {"rollout.gpu_memory_utilization": rollout.gpu_memory_utilization}


def engine_settings(rollout: RolloutConfig) -> dict[str, object]:
    """The keys that lay out one engine."""
    found: dict[str, object] = {"rollout.tp": rollout.tp}
    if rollout.dp > 1:
        found |= {"rollout.dp": rollout.dp, "rollout.nodes": rollout.nodes}
    return found | ({"rollout.ep": True} if rollout.ep else {})


class Search:
    """Layouts of one model, adapter and hardware; `config` gives all that is not layout."""

    def __init__(self, facts: Facts, config: RunConfig, assumed: Assumed):
        self.facts, self.config, self.assumed = facts, config, assumed
        self.spec: AdapterSpec = build_spec(facts, config)
        self.memory = TrainerMemory(facts, self.spec, assumed.weights)
        self.roofline = Roofline(facts, self.spec, assumed.lengths, assumed.weights)
        gpu = assumed.hardware.spec
        self.hardware = (gpu, assumed.hardware.gpus_per_node, assumed.efficiency)
        self.room = gpu.memory * GIB * (1 - MARGIN)
        self._found: dict[tuple, list[RankClass]] = {}
        self._engines: dict[tuple[int, int, bool, float], EngineRank] = {}

    def best(self, count: int) -> list[Proposal]:
        """The fastest of each split of the GPUs between trainer and engines, fastest first."""
        gpus = self.assumed.hardware.gpus
        if self.config.placement.colocated:
            proposals = [p for rollout in self.on_all(gpus) for p in self._turns(rollout, gpus)]
            return sorted(proposals, key=lambda p: p.seconds.step)[:count]
        found = [self._shared(gpus)] if gpus else []
        if any(engine.sequences for _, engine in self.engines()):
            for engines in self.splits(gpus):
                found.append(self._split(gpus - engines, engines))
        proposals = [proposal for proposal in found if proposal is not None]
        return sorted(proposals, key=lambda p: p.seconds.step)[:count]

    def lightest(self) -> tuple[TrainerConfig, RankClass]:
        """The layout whose heaviest rank has least memory, with all GPUs or those of a split.
        Raises ConfigError where there are too few GPUs for any."""
        gpus, cp = self.assumed.hardware.gpus, self.config.trainer.cp
        if cp > gpus:
            raise ConfigError(f"trainer.cp={cp} needs {cp} GPUs at least, and there are {gpus}")
        found = [
            (trainer, self.heaviest(trainer))
            for world in {gpus - engines for engines in (0, *self.splits(gpus))}
            for trainer in trainer_layouts(self.facts.shape, self.config.trainer, world)
        ]
        return min(found, key=lambda pair: pair[1].total)

    def fewest(self) -> int | None:
        """The smallest trainer of a split that fits; None when none does."""
        gpus = self.assumed.hardware.gpus
        for world in sorted(gpus - engines for engines in (0, *self.splits(gpus))):
            for trainer in trainer_layouts(self.facts.shape, self.config.trainer, world):
                if self.heaviest(trainer).total <= self.room:
                    return world
        return None

    def engines(self) -> Iterator[tuple[RolloutConfig, EngineRank]]:
        """One engine of each kind that divides the model and stands on one node of the cluster,
        smallest first; where none of these holds a sequence, of each that stands on several."""
        gpus, fits = self.assumed.hardware.gpus, False
        for tp in ENGINE_TPS:
            if tp > min(self.hardware[1], gpus):
                break
            if divides_engine(self.facts.shape, tp):
                for rollout in self._kinds(tp, tp):
                    engine = self.engine(rollout)
                    fits = fits or engine.sequences > 0
                    yield rollout, engine
        for ranks in range(self.hardware[1], gpus, self.hardware[1]):
            if not fits and (rollout := self._spread(ranks, ranks)) is not None:
                yield rollout, self.engine(rollout)

    def nearest(self, wanted: dict[str, int], count: int = 3) -> list[TrainerConfig]:
        """Trainer layouts of the wanted number of ranks that divide and fit, most like it first."""
        world = wanted["world_size"]

        def distance(t: TrainerConfig) -> float:
            return sum(
                abs(math.log2(getattr(t, key) / max(1, wanted.get(key, 1))))
                for key in ("tp", "pp", "ep")
            )

        fitting = {
            (t.tp, t.pp, t.ep): t
            for t in trainer_layouts(self.facts.shape, self.config.trainer, world)
            if self.heaviest(t).total <= self.room
        }
        return sorted(fitting.values(), key=distance)[:count]

    def splits(self, gpus: int) -> Sequence[int]:
        """Numbers of GPUs for engines alone that are tried."""
        step = max(1, gpus // SPLITS)
        return () if self.config.placement.colocated else range(step, gpus, step)

    def on_all(self, gpus: int) -> Iterator[RolloutConfig]:
        """Engines on all GPUs, of every kind."""
        for tp in ENGINE_TPS:
            if tp <= self.hardware[1] and gpus % tp == 0 and divides_engine(self.facts.shape, tp):
                yield from self._kinds(gpus, tp)

    def _turns(self, rollout: RolloutConfig, gpus: int) -> Iterator[Proposal]:
        """The fastest trainer that takes turns with these engines, if one fits. They may use what
        it leaves in theirs."""
        best, whole = None, self.room / (1 - MARGIN)
        for trainer in trainer_layouts(self.facts.shape, self.config.trainer, gpus):
            config = self.config.model_copy(update={"trainer": trainer, "rollout": rollout})
            classes = self.classes(trainer)
            engine = self.engine(rollout)
            of_rollout, of_update = turns(config, classes, engine)
            free = math.floor((self.room - of_rollout.trainer) / whole * 100) / 100
            if free <= 0 or of_update.total > self.room or not together(config):
                continue
            engine = with_budget(engine, int(free * whole), config.model.max_length)
            if engine.sequences < 1:
                continue
            share = rollout.model_copy(update={"gpu_memory_utilization": free})
            proposal = self.timed(trainer, share, self.heaviest(trainer), engine, shared=False)
            if best is None or proposal.seconds.step < best.seconds.step:
                best = proposal
        if best is not None:
            yield best

    def _split(self, mine: int, theirs: int) -> Proposal | None:
        rollout = self.engines_on(theirs)
        return None if rollout is None else self._proposal(mine, rollout, shared=False)

    def _shared(self, gpus: int) -> Proposal | None:
        """Every GPU holds a trainer rank and an engine of its own, half and half for Ray."""
        most, best = self.sharing(gpus), None
        if self.engine(most).sequences < 1:
            return None  # beside any trainer rank
        for trainer in trainer_layouts(self.facts.shape, self.config.trainer, gpus):
            trainer = trainer.model_copy(update={"gpus_per_rank": 0.5})
            heaviest = self.heaviest(trainer)
            free = math.floor((self.room - heaviest.total) / (self.room / (1 - MARGIN)) * 100) / 100
            if free <= 0:
                continue
            rollout = most.model_copy(update={"gpu_memory_utilization": free})
            engine = self.engine(rollout)
            if engine.sequences < 1:
                continue
            proposal = self.timed(trainer, rollout, heaviest, engine, shared=True)
            if best is None or proposal.seconds.step < best.seconds.step:
                best = proposal
        return best

    def sharing(self, gpus: int) -> RolloutConfig:
        """An engine beside each trainer rank, which may use all that a proposal does."""
        update = {"engines": gpus, "tp": 1, "dp": 1, "nodes": 1, "ep": False}
        update |= {"gpus_per_engine": 0.5, "gpu_memory_utilization": 1 - MARGIN}
        return self.config.rollout.model_copy(update=update)

    def _proposal(self, world: int, rollout: RolloutConfig, shared: bool) -> Proposal | None:
        engine, best = self.engine(rollout), None
        for trainer in trainer_layouts(self.facts.shape, self.config.trainer, world):
            heaviest = self.heaviest(trainer)
            if heaviest.total > self.room:
                continue
            proposal = self.timed(trainer, rollout, heaviest, engine, shared)
            if best is None or proposal.seconds.step < best.seconds.step:
                best = proposal
        return best

    def timed(self, trainer, rollout, heaviest, engine, shared) -> Proposal:
        config = self.config.model_copy(update={"trainer": trainer, "rollout": rollout})
        seconds = self.roofline.seconds(config, heaviest, engine, 0.0, self.hardware)
        return Proposal(config, heaviest, engine, seconds, shared)

    def engines_on(self, gpus: int) -> RolloutConfig | None:
        """The fastest engines on so many GPUs: on a node each, or, where none such fits, on
        several."""
        node, shape = self.hardware[1], self.facts.shape
        sizes = [n for n in ENGINE_TPS if n <= node and gpus % n == 0 and divides_engine(shape, n)]
        on_one = self._fastest(kind for tp in sizes for kind in self._kinds(gpus, tp))
        if on_one is not None:
            return on_one
        spread = (self._spread(gpus, n) for n in range(2 * node, gpus + 1, node) if gpus % n == 0)
        return self._fastest(rollout for rollout in spread if rollout is not None)

    def _fastest(self, engines: Iterable[RolloutConfig]) -> RolloutConfig | None:
        """Of those that hold a sequence."""
        best, least = None, math.inf
        for rollout in engines:
            engine = self.engine(rollout)
            if engine.sequences < 1:
                continue
            config = self.config.model_copy(update={"rollout": rollout})
            seconds = sum(self.roofline.rollout(config, engine, *self.hardware).values())
            if seconds < least:
                best, least = rollout, seconds
        return best

    def _spread(self, gpus: int, ranks: int) -> RolloutConfig | None:
        """Engines of so many data-parallel ranks on whole nodes, where there can be any."""
        config, nodes = self.config, ranks // self.hardware[1]
        can = config.refit.mode == "adapter" and not config.placement.colocated
        if nodes < 2 or not can or not 1 < ranks <= self.facts.shape.num_experts:
            return None
        update = {"engines": gpus // ranks, "tp": 1, "dp": ranks, "nodes": nodes, "ep": True}
        update |= {"gpus_per_engine": None, "fully_sharded": False}
        return config.rollout.model_copy(update=update)

    def _kinds(self, gpus: int, tp: int) -> Iterator[RolloutConfig]:
        """Engines of `tp` ranks on so many GPUs, with experts cut in each way that there is, and
        that leaves the blocks of FP8 weights whole."""
        for ep in (False, True) if tp > 1 and self.facts.shape.num_experts else (False,):
            update = {"engines": gpus // tp, "tp": tp, "ep": ep, "gpus_per_engine": None}
            update |= {"dp": 1, "nodes": 1, "fully_sharded": False}
            kind = self.config.rollout.model_copy(update=update)
            if self.assumed.served != "fp8" or not cut_block(self.facts.shape, kind):
                yield kind

    def engine(self, rollout: RolloutConfig) -> EngineRank:
        config = self.config.model_copy(update={"rollout": rollout})
        key = (rollout.tp, rollout.dp, rollout.ep, rollout.gpu_memory_utilization)
        if key not in self._engines:
            served, gpu = self.assumed.served, self.hardware[0]
            self._engines[key] = engine_rank(self.facts, self.spec, config, served, gpu)
        return self._engines[key]

    def heaviest(self, trainer: TrainerConfig) -> RankClass:
        """The rank with most memory."""
        return max(self.classes(trainer), key=lambda c: c.total)

    def classes(self, trainer: TrainerConfig) -> list[RankClass]:
        """A world size changes them only by how many micro-batches there are to be in flight."""
        config = self.config.model_copy(update={"trainer": trainer})
        flights = min(trainer.pp, micro_batches(config))
        key = (trainer.tp, trainer.cp, trainer.pp, trainer.ep, trainer.recompute, flights)
        if key not in self._found:
            self._found[key] = self.memory.classes(config)
        return self._found[key]


def trainer_layouts(
    shape: ModelShape, trainer: TrainerConfig, world: int
) -> Iterator[TrainerConfig]:
    """All that divide the model, with and without recomputation; etp and vpp stay 1, and cp what
    it is."""
    for tp in TPS:
        if world % tp or not divides(shape, tp, trainer.cp):
            continue
        for pp in range(1, min(MAX_PP, shape.num_layers) + 1):
            if world % (tp * trainer.cp * pp):
                continue
            ranks = world // pp
            for ep in range(1, min(ranks, shape.num_experts or 1) + 1):
                if ranks % ep or shape.num_experts % ep:
                    continue
                for recompute in ("none",) if trainer.offloads_activations else ("none", "full"):
                    layout = {"world_size": world, "tp": tp, "pp": pp, "ep": ep, "etp": 1}
                    layout |= {"vpp": 1, "recompute": recompute, "gpus_per_rank": 1.0}
                    yield trainer.model_copy(update=layout)


def together(config: RunConfig) -> bool:
    try:
        return gpus_together(config) > 0
    except ConfigError:
        return False


def divides(shape: ModelShape, tp: int, cp: int) -> bool:
    """Whether tp divides the heads, and the key/value heads where they are cut; and cp ranks can
    share those that are left."""
    heads, kv_heads = shape.dims["heads"], shape.dims.get("kv_heads", tp)
    linear = shape.dims.get("linear_key_heads", heads)
    if heads % tp or kv_heads % tp or linear % tp:
        return False
    shared = all(can_share(number // tp, cp, False) for number in (heads, linear))
    return shared and can_share(kv_heads // tp, cp, True)


def divides_engine(shape: ModelShape, tp: int) -> bool:
    """Whether tp divides the heads. vLLM repeats key/value heads where ranks are more, of most
    families."""
    kv_heads = shape.dims.get("kv_heads", tp)
    if shape.dims.get("linear_key_heads", tp) % tp:
        return False
    repeated = shape.family.repeats_keys and tp % kv_heads == 0
    return shape.dims["heads"] % tp == 0 and (kv_heads % tp == 0 or repeated)
