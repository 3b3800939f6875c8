"""The engines as one ticket sees them: the policy, and the models beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lora_moe_rl.data.samples import Sample
from lora_moe_rl.ports import Manner, Ref, Turn, Watch
from lora_moe_rl.router_replay import travel

if TYPE_CHECKING:
    from lora_moe_rl.cluster.engines import RolloutEngines


@dataclass(frozen=True)
class TicketPolicy:
    engines: RolloutEngines
    version: int
    seed: int
    watch: Watch
    manner: Manner | None
    asked: Iterator[int] = field(default_factory=itertools.count)  # how often without a turn
    places: dict[int, int] = field(default_factory=dict)  # engines of the conversations

    async def sample(
        self, token_ids: Sequence[int], n: int, turn: Turn | None = None
    ) -> tuple[list[Sample], Ref]:
        if turn is not None:
            seed = _seed_of(self.seed, turn)
        elif number := next(self.asked):  # not once more what was sampled before
            seed = _seed(self.seed, number)
        else:
            seed = self.seed
        how = self.version, seed, self.watch, turn, self.manner
        return await self.engines.sample(token_ids, n, *how, self.places)

    def join(self, samples: Sequence[Sequence[Ref]]) -> Ref:
        return travel.join(samples)

    def beside(self, version: int | None, manner: Manner) -> BesidePolicy:
        return BesidePolicy(self.engines, version, self.seed, self.watch, manner)

    def held_up(self) -> float:
        return self.engines.held_up.seconds()


@dataclass(frozen=True)
class BesidePolicy:
    """`version`, or the bare base (None), for turns that are in no sample: they have no routes."""

    engines: RolloutEngines
    version: int | None
    seed: int
    watch: Watch
    manner: Manner

    async def sample(
        self, token_ids: Sequence[int], n: int, turn: Turn | None = None
    ) -> tuple[list[Sample], Ref]:
        assert n == 1 and turn is not None
        seed = self.manner.seed
        if seed is None:  # not that of the policy's own turn
            seed = _seed_of(self.seed, turn, 1 if self.version is None else 2 + self.version)
        how = self.version, turn, seed, self.manner, self.watch
        return [await self.engines.say(token_ids, *how)], None


def _seed_of(seed: int, turn: Turn, *more: int) -> int:
    """The seed of one turn: it depends on the ticket's seed, the conversation and the turn's number
    alone, and on `more` that tells its conversation from others of that number."""
    return _seed(seed, turn.conversation, turn.number, *more)


def _seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
