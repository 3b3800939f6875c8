"""Layouts that a search tried and does not propose, and by how many bytes they do not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lora_moe_rl.planner.hardware import GIB
from lora_moe_rl.planner.proposal import Proposal, engine_settings
from lora_moe_rl.planner.rollout import EngineRank, with_budget
from lora_moe_rl.planner.search import Search, together
from lora_moe_rl.planner.trainer import RankClass
from lora_moe_rl.planner.turns import Turn, turns


@dataclass(frozen=True)
class Refused:
    """What does not fit by `over` bytes of a GPU. `step`: seconds as if they were there; None of an
    engine alone, which has no room for a sequence."""

    settings: dict[str, object]
    step: float | None
    over: int
    why: str


def refused(search: Search, best: Iterable[Proposal], count: int = 3) -> list[Refused]:
    """Layouts that would be faster than the last of `best`, the nearest to fitting first and each
    faster than those before it; where none would be, the fastest of all. Then the nearest kinds of
    engine that hold no sequence."""
    slowest = max((p.seconds.step for p in best), default=math.inf)
    found = sorted(_layouts(search), key=lambda one: (one.over, one.step))
    chosen = front([one for one in found if one.step is not None and one.step < slowest])
    if not chosen and found:
        chosen = [min(found, key=lambda one: one.step or math.inf)]
    return [*chosen[:count], *sorted(_engines(search), key=lambda one: one.over)[: count - 1]]


def front(found: Iterable[Refused]) -> list[Refused]:
    """Those that are faster than all before them."""
    chosen: list[Refused] = []
    for one in found:
        if not chosen or (one.step or 0.0) < (chosen[-1].step or 0.0):
            chosen.append(one)
    return chosen


def _layouts(search: Search) -> Iterator[Refused]:
    gpus = search.assumed.hardware.gpus
    if search.config.placement.colocated:
        yield from _in_turns(search, gpus)
        return
    yield from _beside_engines(search, gpus)
    for mine, theirs in search.pairs():
        rollout = search.engines_on(theirs)
        if rollout is None:
            continue
        engine = search.engine(rollout)
        for trainer in search.trainers(mine):
            heaviest = search.heaviest(trainer)
            if heaviest.total > search.room:
                timed = search.timed(trainer, rollout, heaviest, engine, shared=False)
                what = f"a trainer rank of {heaviest.name} holds"
                yield _refused(search, timed, heaviest.total, what, _largest(heaviest))


def _in_turns(search: Search, gpus: int) -> Iterator[Refused]:
    """Trainers and engines on all GPUs, of which a turn does not fit."""
    for rollout in search.on_all(gpus):
        engine = one_sequence(search, search.engine(rollout))
        for trainer in search.trainers(gpus):
            config = search.config.model_copy(update={"trainer": trainer, "rollout": rollout})
            turn: Turn = max(turns(config, search.classes(trainer), engine), key=lambda t: t.total)
            if turn.total > search.room and together(config):
                heaviest = search.heaviest(trainer)
                timed = search.timed(trainer, rollout, heaviest, engine, shared=False)
                what = f"in the turn of the {turn.name} a GPU holds"
                of = f"a trainer rank's {turn.trainer / GIB:.1f} and an engine's "
                yield _refused(search, timed, turn.total, what, f"{of}{turn.engine / GIB:.1f}")


def _beside_engines(search: Search, gpus: int) -> Iterator[Refused]:
    """A trainer rank and an engine of its own on every GPU, at once."""
    rollout = search.sharing(gpus)
    if not search.can_share(rollout):
        return
    engine = one_sequence(search, search.engine(rollout))
    for trainer in search.trainers(gpus):
        trainer = trainer.model_copy(update={"gpus_per_rank": 0.5})
        heaviest = search.heaviest(trainer)
        total = heaviest.total + engine.budget
        if total > search.room:
            timed = search.timed(trainer, rollout, heaviest, engine, shared=True)
            of = f"a trainer rank's {heaviest.total / GIB:.1f} and an engine's "
            yield _refused(search, timed, total, "a GPU holds", f"{of}{engine.budget / GIB:.1f}")


def one_sequence(search: Search, engine: EngineRank) -> EngineRank:
    """The rank with a budget for one sequence, or for as many as it has room for."""
    length = search.config.model.max_length
    least = engine.weights + engine.slots + engine.working + engine.kv_token * length
    return with_budget(engine, least, length)


def _refused(search: Search, timed: Proposal, held: int, what: str, of: str) -> Refused:
    over = math.ceil(held - search.room)
    return Refused(
        timed.settings,
        timed.seconds.step,
        over,
        f"{what} {held / GIB:.1f} GiB ({of}) and a proposal uses {search.room / GIB:.1f} of "
        f"{search.assumed.hardware.spec.memory:g}: {over:,} bytes over",
    )


def _largest(rank: RankClass) -> str:
    kind, size = rank.largest
    return f"most of it {kind}, {size / GIB:.1f}"


def _engines(search: Search) -> Iterator[Refused]:
    """Kinds of engine that hold no sequence in vLLM's share of a GPU of their own."""
    if search.config.placement.colocated:
        return
    length = search.config.model.max_length
    for rollout, engine in search.engines():
        over = engine.kv_token * length - engine.kv_cache
        if over > 0:
            why = (
                f"an engine rank holds weights of {engine.weights / GIB:.1f} GiB, adapter slots of "
                f"{engine.slots / GIB:.1f} and {engine.working / GIB:.1f} to work with, a sequence "
                f"of {length:,} tokens takes {engine.kv_token * length / GIB:.1f}, and vLLM's "
                f"share is {engine.budget / GIB:.1f}: {over:,} bytes over"
            )
            yield Refused(engine_settings(rollout), None, over, why)
