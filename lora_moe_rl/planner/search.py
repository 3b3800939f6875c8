"""Layouts of a run on a number of GPUs: those that divide the model and fit, by estimated time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RolloutConfig, RunConfig, TrainerConfig
from lora_moe_rl.config.sharing import gpus_together
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models.fit import cut_block
from lora_moe_rl.planner.compute import Roofline
from lora_moe_rl.planner.facts import Facts
from lora_moe_rl.planner.hardware import GIB
from lora_moe_rl.planner.layouts import Kept, divides_engine, splits, totals, trainer_layouts
from lora_moe_rl.planner.plan import Assumed, build_spec, not_served
from lora_moe_rl.planner.proposal import Proposal
from lora_moe_rl.planner.rollout import EngineRank, engine_rank, with_budget
from lora_moe_rl.planner.trainer import RankClass, TrainerMemory, micro_batches
from lora_moe_rl.planner.turns import turns

ENGINE_TPS = (1, 2, 4, 8, 16, 32, 64)
# What proposals leave free of a trainer rank's GPU: the plan is 12 % below the two published
# figures of a rank's memory (planner/published.py).
MARGIN = 0.15


class Search:
    """Layouts of one model, adapter and hardware; `config` gives all that is not layout, and what
    is `kept` of it."""

    def __init__(self, facts: Facts, config: RunConfig, assumed: Assumed, kept: Kept | None = None):
        self.kept: Kept = {"trainer": {}, "rollout": {}} | dict(kept or {})
        self.facts, self.config, self.assumed = facts, config, assumed
        self.spec: AdapterSpec = build_spec(facts, config)
        self.memory = TrainerMemory(facts, self.spec, assumed.weights)
        self.roofline = Roofline(facts, self.spec, assumed.lengths, assumed.weights)
        gpu = assumed.hardware.spec
        self.hardware = (gpu, assumed.hardware.gpus_per_node, assumed.efficiency)
        self.room = gpu.memory * GIB * (1 - MARGIN)
        self._found: dict[tuple, list[RankClass]] = {}
        self._engines: dict[tuple, EngineRank] = {}

    def best(self, count: int) -> list[Proposal]:
        """The fastest of each split of the GPUs between trainer and engines, fastest first."""
        found: list[Proposal | None] = []
        if self.config.placement.colocated:
            for total in self.totals:
                found += [p for rollout in self.on_all(total) for p in self._turns(rollout, total)]
        else:
            found += [self._shared(total) for total in self.totals]
            if any(engine.sequences for _, engine in self.engines()):
                found += [self._split(mine, theirs) for mine, theirs in self.pairs()]
        proposals = [proposal for proposal in found if proposal is not None]
        return sorted(proposals, key=lambda p: (p.seconds.step, p.gpus))[:count]

    def lightest(self) -> tuple[TrainerConfig, RankClass]:
        """The layout whose heaviest rank has least memory, with all GPUs or those of a split.
        Raises ConfigError where there are too few GPUs for any."""
        gpus, cp = self.assumed.hardware.gpus, self.config.trainer.cp
        if cp > gpus:
            raise ConfigError(f"trainer.cp={cp} needs {cp} GPUs at least, and there are {gpus}")
        found = [
            (trainer, self.heaviest(trainer))
            for world in self._worlds()
            for trainer in self.trainers(world)
        ]
        if not found:
            given = " ".join(f"trainer.{key}={one}" for key, one in self.kept["trainer"].items())
            raise ConfigError(
                f"no trainer on up to {gpus} GPUs with {given} divides {self.facts.name}: its "
                f"{self.facts.shape.num_experts} experts by ep, its heads by tp, the GPUs by all"
            )
        return min(found, key=lambda pair: pair[1].total)

    def fewest(self) -> int | None:
        """The smallest trainer of a split that fits; None when none does."""
        for world in sorted(self._worlds()):
            for trainer in self.trainers(world):
                if self.heaviest(trainer).total <= self.room:
                    return world
        return None

    def trainers(self, world: int) -> Iterator[TrainerConfig]:
        """Layouts of a trainer of so many ranks."""
        shape, trainer = self.facts.shape, self.config.trainer
        return trainer_layouts(shape, trainer, world, self.kept["trainer"])

    @property
    def totals(self) -> list[int]:
        return totals(self.assumed.hardware.gpus, self.hardware[1])

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Numbers of GPUs for the trainer and for engines alone that are tried."""
        for total in () if self.config.placement.colocated else self.totals:
            for theirs in splits(total, self.hardware[1]):
                yield total - theirs, theirs

    def _worlds(self) -> set[int]:
        return {*self.totals, *(mine for mine, _ in self.pairs())}

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
            for t in self.trainers(world)
            if self.heaviest(t).total <= self.room
        }
        return sorted(fitting.values(), key=distance)[:count]

    def on_all(self, gpus: int) -> Iterator[RolloutConfig]:
        """Engines on all GPUs, of every kind."""
        for tp in ENGINE_TPS:
            if tp <= self.hardware[1] and gpus % tp == 0 and divides_engine(self.facts.shape, tp):
                yield from self._as_many(self._kinds(gpus, tp))

    def _turns(self, rollout: RolloutConfig, gpus: int) -> Iterator[Proposal]:
        """The fastest trainer that takes turns with these engines, if one fits. They may use what
        it leaves in theirs."""
        best, whole = None, self.room / (1 - MARGIN)
        for trainer in self.trainers(gpus):
            config = self.config.model_copy(update={"trainer": trainer, "rollout": rollout})
            classes = self.classes(trainer)
            engine = self.engine(rollout)
            of_rollout, of_update = turns(config, classes, engine)
            free = self._share((self.room - of_rollout.trainer) / whole)
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
        if not self.engine(most).sequences or not self.can_share(most):
            return None  # beside any trainer rank
        for trainer in self.trainers(gpus):
            trainer = trainer.model_copy(update={"gpus_per_rank": 0.5})
            heaviest = self.heaviest(trainer)
            free = self._share((self.room - heaviest.total) / (self.room / (1 - MARGIN)))
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
        update |= {"fully_sharded": False}
        update |= {"gpus_per_engine": 0.5, "gpu_memory_utilization": 1 - MARGIN}
        return self.config.rollout.model_copy(update=update)

    def can_share(self, most: RolloutConfig) -> bool:
        """Whether such engines may stand beside trainer ranks: they are as kept, and served."""
        return self._can_be(most) and any(self._as_many([most]))

    def _share(self, free: float) -> float:
        """What engines may use of GPUs of which so much is free: all, in whole hundredths, or what
        is kept; 0 where that is not free."""
        share = math.floor(free * 100) / 100
        kept = self.kept["rollout"].get("gpu_memory_utilization", share)
        return kept if kept <= share else 0.0

    def _proposal(self, world: int, rollout: RolloutConfig, shared: bool) -> Proposal | None:
        engine, best = self.engine(rollout), None
        for trainer in self.trainers(world):
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
        kinds = (kind for tp in sizes for kind in self._kinds(gpus, tp))
        on_one = self._fastest(self._as_many(kinds))
        if on_one is not None:
            return on_one
        spread = (self._spread(gpus, n) for n in range(2 * node, gpus + 1, node) if gpus % n == 0)
        return self._fastest(self._as_many(one for one in spread if one is not None))

    def _as_many(self, kinds: Iterable[RolloutConfig]) -> Iterator[RolloutConfig]:
        """Those whose number of engines is as it is kept."""
        wanted = self.kept["rollout"].get("engines")
        return (kind for kind in kinds if wanted is None or kind.engines == wanted)

    def _fastest(self, engines: Iterable[RolloutConfig]) -> RolloutConfig | None:
        """The fastest of the engines that hold a sequence."""
        best, least = None, math.inf
        for rollout in engines:
            engine = self.engine(rollout)
            if engine.sequences < 1:
                continue
            parts = self.roofline.rollout(self._with(rollout), engine, *self.hardware)
            seconds = sum(parts.values())
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
        kind = config.rollout.model_copy(update=update)
        return kind if self._can_be(kind) else None

    def _kinds(self, gpus: int, tp: int) -> Iterator[RolloutConfig]:
        """Engines of `tp` ranks on so many GPUs, with experts cut in each way that there is, and
        that leaves the blocks of FP8 weights whole. Slots are cut in all dimensions where vLLM
        would not take them otherwise."""
        for ep in (False, True) if tp > 1 and self.facts.shape.num_experts else (False,):
            update = {"engines": gpus // tp, "tp": tp, "ep": ep, "gpus_per_engine": None}
            update |= {"dp": 1, "nodes": 1, "fully_sharded": False}
            kind = self.config.rollout.model_copy(update=update)
            wanted = self.kept["rollout"].get("fully_sharded", False)
            if tp > 1 and not ep and (wanted or not_served(self._with(kind), self.spec)):
                kind = kind.model_copy(update={"fully_sharded": True})
            whole = self.assumed.served != "fp8" or not cut_block(self.facts.shape, kind)
            if whole and self._can_be(kind):
                yield kind

    def _can_be(self, kind: RolloutConfig) -> bool:
        """Whether vLLM serves it, and it is as what is kept says but for the number of engines."""
        kept = {k: v for k, v in self.kept["rollout"].items() if k in ("tp", "ep", "fully_sharded")}
        same = all(getattr(kind, key) == value for key, value in kept.items())
        return same and not not_served(self._with(kind), self.spec)

    def _with(self, rollout: RolloutConfig) -> RunConfig:
        return self.config.model_copy(update={"rollout": rollout})

    def engine(self, rollout: RolloutConfig) -> EngineRank:
        share = rollout.gpu_memory_utilization
        key = (rollout.tp, rollout.dp, rollout.ep, rollout.fully_sharded, share)
        if key not in self._engines:
            served, gpu = self.assumed.served, self.hardware[0]
            config = self._with(rollout)
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


def together(config: RunConfig) -> bool:
    try:
        return gpus_together(config) > 0
    except ConfigError:
        return False
