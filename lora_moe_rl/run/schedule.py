"""Who may go ahead of whom: pure rules, without I/O or clocks.

    schedule   a ticket may be ahead by    a token may be older than the update by
    lag 0      nothing: synchronous        0 steps, of one version each
    lag 1      one step of groups          1
    lag k      k steps                     k

Nothing is thrown away to hold the bound: a ticket that is about to become too old is waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


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
    most `versions_per_step` versions each."""

    groups_per_step: int
    lag: int = 0
    versions_per_step: int = 1

    @property
    def width(self) -> int:
        """Most tickets that are under way at once."""
        return (self.lag + 1) * self.groups_per_step

    def may_admit(self, under_way: int) -> bool:
        """Whether one more ticket may be drawn beside those that are neither trained nor
        dropped."""
        return under_way < self.width

    def next_step(self, scored: Collection[T], rolling: int | None, newest: int) -> list[T]:
        """The tickets of the step that updates version `newest`, in the order of their numbers;
        none when it has to wait for more, or for one that would be too old for the step after.
        `rolling`: the oldest version of those that still roll, None when none does."""
        if len(scored) < self.groups_per_step:
            return []
        if rolling is not None and newest - rolling >= self._oldest:
            return []
        oldest: Sequence[T] = sorted(scored, key=lambda ticket: (ticket.version, ticket.number))
        return sorted(oldest[: self.groups_per_step], key=lambda ticket: ticket.number)

    def is_stale(self, ticket: Aged, newest: int) -> bool:
        """Whether the step that updates version `newest` may not use the ticket any more."""
        return newest - ticket.version > self._oldest

    @property
    def _oldest(self) -> int:
        """The age in versions that a token may have."""
        return self.lag * self.versions_per_step


def seed_of(run_seed: int, number: int, groups_per_step: int) -> int:
    """The seed of a ticket's samples: of its number alone, whatever the schedule, so that no
    generator's state must be saved. vLLM seeds sample i of the ticket with this seed + i."""
    import numpy as np

    def one(*entropy: int) -> int:
        return int(np.random.SeedSequence(entropy).generate_state(1)[0])

    step, place = divmod(number, groups_per_step)
    return one(one(run_seed, step + 1), place)
