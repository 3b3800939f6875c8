"""Which fault comes when: by a seed alone. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np

from lora_moe_rl.errors import ConfigError

FIRST = 2  # the step before it shows how long a step takes
LAST_GOOD = 2  # steps after the last fault, in which it can be noticed and be over


@dataclass(frozen=True)
class Fault:
    """`kind` comes while `step` is under way, when `phase` (0 to 1) of a usual step's time has
    passed. `victim` chooses among several engines, ranks or processes, by its remainder."""

    step: int
    kind: str
    phase: float
    victim: int


def rate_of(text: str) -> Fraction:
    """Faults a step: `1/20`, `0.05`. Raises ConfigError for what is none, and unless it is above 0
    and at most 1."""
    try:
        rate = Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"--rate {text} is no number of faults a step; write 1/20") from error
    if not 0 < rate <= 1:
        raise ConfigError(f"--rate {text} is not above 0 and at most 1: faults a step, as 1/20")
    return rate


def plan(kinds: Sequence[str], rate: Fraction, steps: int, seed: int) -> list[Fault]:
    """As many faults as the rate makes of the steps: each at a step that the seed draws out of a
    stretch of its own, all of which are as long. All kinds have come once before one comes again.

    Raises ConfigError when that is none, or more than one a step.
    """
    room, count = steps - LAST_GOOD - FIRST + 1, round(rate * steps)
    if not 1 <= count <= room:
        raise ConfigError(
            f"--steps {steps} with --rate {rate} makes {count} faults, one each in the steps "
            f"{FIRST} to {steps - LAST_GOOD} at most, and at least one"
        )
    draws = np.random.default_rng(seed)
    bounds = [FIRST + i * room // count for i in range(count + 1)]
    return [
        Fault(
            int(draws.integers(start, stop)),
            kind,
            float(draws.random()),
            int(draws.integers(2**16)),
        )
        for (start, stop), kind in zip(pairwise(bounds), _decks(kinds, draws), strict=False)
    ]


def _decks(kinds: Sequence[str], draws: np.random.Generator) -> Iterator[str]:
    """All kinds in some order, and again in another, for ever."""
    while True:
        for i in draws.permutation(len(kinds)):
            yield kinds[int(i)]
