"""What rewards say of a group: a number a sample, and what is known beside it. Plain numpy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Played:
    """What became of the environment of one conversation, as reward functions are shown it:
    `factory` is how it was named (file.py:Class), `state` its attributes that JSON knows, and
    `prompt` what it was asked, with what its reset added."""

    factory: str
    state: dict[str, Any]
    prompt: Any  # str, or a list of {"role", "content"}


@dataclass(frozen=True)
class FunctionRewards:
    """What one of several reward functions gave a group's samples, before its weight: float32 [n],
    NaN for none. num_failed: how many of those have failed, several samples of one conversation
    counted once. failure: why the last of them has, '' when none has."""

    weight: float
    rewards: np.ndarray
    num_failed: int = 0
    failure: str = ""


@dataclass(frozen=True)
class Details:
    """What is known of a group's rewards beside the rewards. by_function: of several functions,
    by name. reasons: why a sample's reward failed, by the sample's place. extra: more columns of
    samples.jsonl, a value a sample. metrics: numbers that a reward function has logged, by the name
    of the metric. by_turn: of a sample's reward what was earned at the end of each turn, by the
    sample's place, where a reward function or the environment tells it."""

    by_function: dict[str, FunctionRewards] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    by_turn: dict[int, list[float]] = field(default_factory=dict)

    def at(self, places: np.ndarray) -> Details:
        """Of other samples, each of which has what the one at its place here has. places: int
        [n], -1 for a sample that has nothing."""
        functions = {
            name: replace(one, rewards=_or_nan(one.rewards, places))
            for name, one in self.by_function.items()
        }
        chosen = dict(enumerate(places.tolist()))
        reasons = {i: self.reasons[at] for i, at in chosen.items() if at in self.reasons}
        extra = {
            column: [None if at < 0 else values[at] for at in chosen.values()]
            for column, values in self.extra.items()
        }
        by_turn = {i: self.by_turn[at] for i, at in chosen.items() if at in self.by_turn}
        found = {"by_function": functions, "reasons": reasons, "extra": extra, "by_turn": by_turn}
        return replace(self, **found)


class Scores(NamedTuple):
    """What a group's samples were given; fields of Group, in their order there."""

    rewards: np.ndarray
    failures: list[str]
    details: Details

    def at(self, places: np.ndarray) -> Scores:
        """Of other samples, as `Details.at` has it; the failures stay as they are."""
        return Scores(_or_nan(self.rewards, places), self.failures, self.details.at(places))


def _or_nan(rewards: np.ndarray, places: np.ndarray) -> np.ndarray:
    """float32 [n], the rewards at `places`, NaN at -1."""
    return np.append(rewards, np.float32(np.nan))[places]
