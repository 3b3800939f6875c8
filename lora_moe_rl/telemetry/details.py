"""What trackers may show of a step beside its numbers: a few samples, and distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.data.samples import Group
from lora_moe_rl.telemetry import names

COLUMNS = ("prompt", "response", "reward", "advantage", "tokens", "finish_reason")


@dataclass(frozen=True)
class Details:
    """`samples`: as samples.jsonl has them. `histograms`: float arrays [n] of finite values, by
    their names in the metric table; those without any value are left out."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    histograms: dict[str, np.ndarray] = field(default_factory=dict)

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows of the samples. Learning from answers, there is no reward column."""
        columns = [name for name in COLUMNS if any(name in one for one in self.samples)]
        return columns, [[one.get(name) for name in columns] for one in self.samples]


def of_step(
    samples: list[dict[str, Any]],
    groups: Sequence[Group],
    signals: Sequence[Signal],
    sampled: bool = True,
) -> Details:
    """`samples` are those that were written. A conversation's reward counts once; advantages are
    those of the tokens that are learned from. `sampled`: False for rows' own answers, of which
    there are lengths alone."""
    rewards = [group.rewards[group.ends] for group in groups]
    lengths = [[len(sample.response_ids) for sample in group.samples] for group in groups]
    advantages = [
        advantage[weight > 0]
        for signal in signals
        for weight, advantage in zip(signal.weights, signal.advantages, strict=True)
    ]
    every: dict[str, Sequence[Any]] = {names.LENGTH_HISTOGRAM: lengths}
    if sampled:
        every |= {names.REWARD_HISTOGRAM: rewards, names.ADVANTAGE_HISTOGRAM: advantages}
    arrays = {name: np.concatenate(parts).astype(np.float64) for name, parts in every.items()}
    finite = {name: values[np.isfinite(values)] for name, values in arrays.items()}
    return Details(samples, {name: values for name, values in finite.items() if values.size})
