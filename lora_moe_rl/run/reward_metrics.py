"""What is recorded of a step's rewards: of all, of each data set, of each function."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group
from lora_moe_rl.run.health import group_metrics
from lora_moe_rl.telemetry import names

SET_METRICS = {
    "mean": names.REWARD,
    "solved_all": names.SOLVED_ALL,
    "solved_none": names.SOLVED_NONE,
}


def reward_metrics(groups: Sequence[Group], config: RunConfig) -> dict[str, float]:
    """All of them. What functions have logged stands under names that none of the others has
    (`rewards/calling.py`)."""
    return {
        **metrics_of(groups),
        **set_metrics(groups, config.data.sets),
        **function_metrics(groups, config.reward.functions),
        **logged_metrics(groups),
    }


def set_metrics(groups: Sequence[Group], data_sets: Iterable[str]) -> dict[str, float]:
    """Of each of several data sets: its groups in the step, and over them what `metrics_of`
    says of all; NaN for a set that has none in the step."""
    found: dict[str, float] = {}
    for name in data_sets:
        own = [group for group in groups if group.prompt.data_set == name]
        every = metrics_of(own) if own else {}
        found[names.of_set(name, "groups")] = len(own)
        for what, metric in SET_METRICS.items():
            found[names.of_set(name, what)] = every.get(metric, math.nan)
    return found


def function_metrics(groups: Sequence[Group], functions: Iterable[str]) -> dict[str, float]:
    """Of each of several reward functions, before its weight: mean and deviation over the samples
    that it gave a reward (NaN without any), and for how many samples it gave None and has
    failed."""
    found: dict[str, float] = {}
    for name in functions:
        own = [one for g in groups if (one := g.details.by_function.get(name)) is not None]
        every = np.concatenate([one.rewards for one in own]) if own else np.zeros(0)
        given = every[~np.isnan(every)]
        failed = sum(one.num_failed for one in own)
        found |= {
            names.of_function(name, "mean"): float(given.mean()) if len(given) else math.nan,
            names.of_function(name, "std"): float(given.std()) if len(given) else math.nan,
            names.of_function(name, "none"): len(every) - len(given) - failed,
            names.of_function(name, "failed"): failed,
        }
    return found


def logged_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The means of what reward functions have logged in the step."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for name, numbers in group.details.metrics.items():
            values.setdefault(names.of_reward(name), []).extend(numbers)
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}


def metrics_of(groups: Sequence[Group]) -> dict[str, float]:
    """Over the samples that have a reward; NaN when none has."""
    rewards = np.concatenate([group.rewards for group in groups])
    given = rewards[~np.isnan(rewards)]
    failed = sum(len(group.failures) for group in groups)
    return {
        names.REWARD: float(given.mean()) if len(given) else math.nan,
        names.REWARD_STD: float(given.std()) if len(given) else math.nan,
        names.REWARDS_NONE: len(rewards) - len(given) - failed,
        names.REWARDS_FAILED: failed,
        **group_metrics(groups),
    }
