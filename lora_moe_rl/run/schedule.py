"""Who may go ahead of whom: pure rules, without I/O or clocks.

    schedule   a ticket may be ahead by    a token may be older than the update by
    lag 0      nothing: synchronous        0 steps, of one version each
    lag 1      one step of groups          1
    lag k      k steps                     k

By default (stale=wait) nothing is thrown away to hold the bound: a step is taken only if all that
are under way can still be trained in time after it, oldest first, and is waited with otherwise.
With the other ways the trainer does not wait for them, and a group may come too late:

    train      it is trained all the same, at most 2 lag steps old
    drop       another prompt is drawn in its place
    redraw     its prompt is sampled once more, at the version that is served then

They wait for one thing: a version that still rolls a step after its bound holds the slot that the
next one goes to (refit.slots of lag + 2). A request that is continued under every new version holds
none: then drop and redraw do not wait at all, and train does to keep its bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Protocol, TypeVar

from lora_moe_rl.config.schedule import Stale


class Aged(Protocol):
    """`version` is the adapter version that the ticket's oldest token is of."""

    @property
    def number(self) -> int: ...

    @property
    def version(self) -> int: ...


T = TypeVar("T", bound=Aged)


@dataclass(frozen=True)
class Schedule:
    """`groups_per_step` tickets make a step; `lag` is the age in steps that a token may have, of at
    most `versions_per_step` versions each. `stale`: what becomes of a ticket that is older.
    `continued`: whether requests go on under the newest version (schedule.in_flight)."""

    groups_per_step: int
    lag: int = 0
    versions_per_step: int = 1
    stale: Stale = "wait"
    continued: bool = False

    @property
    def width(self) -> int:
        """Most tickets that are under way at once."""
        return (self.lag + 1) * self.groups_per_step

    def may_admit(self, under_way: int) -> bool:
        """Whether one more ticket may be drawn beside those that are neither trained nor
        dropped."""
        return under_way < self.width

    def next_step(self, scored: Collection[T], rolling: Collection[T], newest: int) -> list[T]:
        """The tickets of the step that updates version `newest`, in the order of their numbers;
        none when it has to wait (`missing` says for what)."""
        if self.missing(scored, rolling, newest):
            return []
        return sorted(self._oldest_first(scored)[: self.groups_per_step], key=_number)

    def missing(self, scored: Collection[T], rolling: Collection[T], newest: int) -> str:
        """What the step that updates version `newest` has to wait for; '' for nothing."""
        if len(scored) < self.groups_per_step:
            return "scored groups"
        if self.stale == "wait":
            left = self._oldest_first(scored)[self.groups_per_step :]
            in_time = self._in_time(self._oldest_first(chain(left, rolling)), newest)
        elif self.continued and self.stale != "train":
            in_time = True
        else:
            in_time = not any(self.is_stale(ticket, newest) for ticket in rolling)
        return "" if in_time else "the oldest groups"

    def is_stale(self, ticket: Aged, newest: int) -> bool:
        """Whether the ticket is older than lag allows in the step that updates `newest`."""
        return newest - ticket.version > self.lag * self.versions_per_step

    def _in_time(self, left: Collection[Aged], newest: int) -> bool:
        """Whether all of `left`, oldest first, can be trained within the bound by the steps after
        the one that updates `newest`, however many versions each makes."""
        steps = (1 + place // self.groups_per_step for place in range(len(left)))
        return not any(
            self.is_stale(ticket, newest + step * self.versions_per_step)
            for ticket, step in zip(left, steps, strict=True)
        )

    @staticmethod
    def _oldest_first(tickets: Iterable[T]) -> list[T]:
        return sorted(tickets, key=lambda ticket: (ticket.version, ticket.number))


def _number(ticket: Aged) -> int:
    return ticket.number


def seed_of(run_seed: int, number: int, groups_per_step: int) -> int:
    """The seed of a ticket's samples: of its number alone, whatever the schedule, so that no
    generator's state must be saved. vLLM seeds sample i of the ticket with this seed + i."""
    import numpy as np

    def one(*entropy: int) -> int:
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    step, place = divmod(number, groups_per_step)
    return one(one(run_seed, step + 1), place)
