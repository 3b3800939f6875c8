"""What is recorded of a step's rewards: of all, of each data set, of each function; of a teacher's;
and of what was drawn by them. Several samples of one conversation have one reward, which counts
once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.keys import value_of
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.data.samples import TOO_LONG, Group, Sample
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
        **metrics_of(groups, config.algorithm.equal_within),
        **set_metrics(groups, config.data.sets, config.algorithm.equal_within),
        **function_metrics(groups, config.reward.functions),
        **logged_metrics(groups),
        **turn_metrics(groups),
        **alike_metrics(groups, config),
        **baseline_metrics(groups),
        **teacher_metrics(groups),
    }


def set_metrics(
    groups: Sequence[Group], data_sets: Iterable[str], within: float = 0.0
) -> dict[str, float]:
    """The metrics of each of several data sets: its groups in the step, and over them what
    `metrics_of` says of all; NaN for a set that has none in the step."""
    found: dict[str, float] = {}
    for name in data_sets:
        own = [group for group in groups if group.prompt.data_set == name]
        every = metrics_of(own, within) if own else {}
        found[names.of_set(name, "groups")] = len(own)
        for what, metric in SET_METRICS.items():
            found[names.of_set(name, what)] = every.get(metric, math.nan)
    return found


def function_metrics(groups: Sequence[Group], functions: Iterable[str]) -> dict[str, float]:
    """The metrics of each of several reward functions, before its weight: mean (NaN without any)
    and deviation over the samples that it gave a reward, and for how many samples it gave None and
    has failed."""
    found: dict[str, float] = {}
    for name in functions:
        own = [(one, g.ends) for g in groups if (one := g.details.by_function.get(name))]
        every = np.concatenate([one.rewards[ends] for one, ends in own]) if own else np.zeros(0)
        given = every[~np.isnan(every)]
        failed = sum(one.num_failed for one, _ in own)
        found |= {
            names.of_function(name, "mean"): float(given.mean()) if len(given) else math.nan,
            names.of_function(name, "none"): len(every) - len(given) - failed,
            names.of_function(name, "failed"): failed,
            **_deviation(names.of_function(name, "std"), given),
        }
    return found


def turn_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The share of samples of whose reward it is told which turn has earned what, and what of their
    rewards was earned before the last turn, the mean; nothing where that is told of none."""
    told = [
        group.details.by_turn[end]
        for group in groups
        for end in group.ends.tolist()
        if end in group.details.by_turn
    ]
    if not told:
        return {}
    return {
        names.BY_TURN: len(told) / sum(len(group.ends) for group in groups),
        names.BEFORE_LAST_TURN: float(np.mean([sum(turns[:-1]) for turns in told])),
    }


def alike_metrics(groups: Sequence[Group], config: RunConfig) -> dict[str, float]:
    """With an advantage that compares turns, of those in the loss of samples with a reward: the
    share that are compared with no other, and the mean number of those that are compared with each
    other; NaN without any. Nothing with other advantages."""
    advantage = value_of(config, "algorithm.advantage")
    if advantage is None or not (kind := PARTS["advantage"].find(advantage)).compares_turns:
        return {}
    sizes: list[int] = []
    for group in groups:
        given = [group.samples[i] for i in group.ends.tolist() if not np.isnan(group.rewards[i])]
        compared = (key for sample in given for key in _in_loss(sample, kind.turn_keys(sample)))
        sizes += Counter(compared).values()
    total = sum(sizes)
    return {
        names.TURNS_ALONE: sizes.count(1) / total if total else math.nan,
        names.TURNS_ALIKE: total / len(sizes) if total else math.nan,
    }


def _in_loss(sample: Sample, keys: Sequence[Hashable]) -> list[Hashable]:
    """The keys of those turns of which any token may be in the loss."""
    turns = set(sample.turn_of[sample.mask].tolist())
    return [key for turn, key in enumerate(keys) if turn in turns]


def baseline_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The mean reward of the greedy samples of those groups that have one; nothing without any."""
    given = [group.baseline for group in groups if group.baseline is not None]
    return {names.BASELINE: float(np.mean(given))} if given else {}


def logged_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The means of what reward functions have logged in the step."""
    values: dict[str, list[float]] = {}
    for group in groups:
        for name, numbers in group.details.metrics.items():
            values.setdefault(names.of_reward(name), []).extend(numbers)
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}


def reweight_metrics(groups: Sequence[Group], signals: Sequence[Signal]) -> dict[str, float]:
    """The metrics of samples that were drawn once more by their rewards: the share of those to be
    drawn that stand in the loss, the most times that one does, and the mean reward of all that
    stand there, NaN when none was to be drawn. Nothing where samples are not drawn."""
    drawn = [
        (signal.copies[group.ends], group.rewards[group.ends])
        for group, signal in zip(groups, signals, strict=True)
        if signal.copies is not None
    ]
    if not drawn:
        return {}
    copies, rewards = (np.concatenate(each) for each in zip(*drawn, strict=True))
    total = int(copies.sum())
    mean = float(np.repeat(rewards, copies).astype(np.float64).mean()) if total else math.nan
    return {
        names.REWEIGHT_KEPT: np.count_nonzero(copies) / total if total else math.nan,
        names.REWEIGHT_MOST: int(copies.max()),
        names.REWEIGHT_REWARD: mean,
    }


def teacher_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The metrics of a teacher, over the tokens that a policy sampled in samples with a reward: the
    mean of the policy's logprob less the teacher's, an estimate of the reverse KL, and that of the
    teacher's. Nothing without a teacher; NaN without such tokens."""
    if all(group.teacher is None for group in groups):
        return {}
    found = [
        (teacher[sample.mask], sample.logprobs[sample.mask])
        for group in groups
        if group.teacher is not None
        for teacher, sample, reward in zip(group.teacher, group.samples, group.rewards, strict=True)
        if not np.isnan(reward)
    ]
    read = read_metrics(groups) | likeliest_metrics(groups)
    if not found:
        return {names.TEACHER_KL: math.nan, names.TEACHER_LOGPROB: math.nan, **read}
    teacher, policy = (np.concatenate(each).astype(np.float64) for each in zip(*found, strict=True))
    return {
        names.TEACHER_KL: float((policy - teacher).mean()),
        names.TEACHER_LOGPROB: float(teacher.mean()),
        **read,
    }


def likeliest_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The probability that a teacher gives its likeliest tokens together, mean over the same
    tokens. Nothing where it is not asked for them; NaN without such tokens."""
    if all(group.likeliest is None for group in groups):
        return {}
    found = [
        np.exp(likeliest.logprobs[sample.mask].astype(np.float64)).sum(-1)
        for group in groups
        for likeliest, sample, reward in zip(
            group.likeliest or (), group.samples, group.rewards, strict=True
        )
        if not np.isnan(reward)
    ]
    every = np.concatenate(found) if found else np.zeros(0)
    return {names.TEACHER_MASS: float(every.mean()) if every.size else math.nan}


def read_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of how many samples with a reward a teacher that is the policy itself has read more than
    their prompt, and for how many there was no room. Nothing without such a teacher."""
    if all(group.teacher_read is None for group in groups):
        return {}
    found = [
        (taught, word == TOO_LONG)
        for group in groups
        for taught, word, reward in zip(
            group.taught or (), group.teacher_read or (), group.rewards, strict=True
        )
        if not np.isnan(reward)
    ]
    shares = np.mean(found, axis=0).tolist() if found else [math.nan, math.nan]
    return dict(zip((names.TEACHER_TAUGHT, names.TEACHER_TOO_LONG), shares, strict=True))


def metrics_of(groups: Sequence[Group], within: float = 0.0) -> dict[str, float]:
    """Over the samples that have a reward; NaN when none has. Rewards of a group that are no
    further apart than `within` are one."""
    rewards = np.concatenate([group.rewards[group.ends] for group in groups])
    given = rewards[~np.isnan(rewards)]
    failed = sum(len(group.failures) for group in groups)
    return {
        names.REWARD: float(given.mean()) if len(given) else math.nan,
        names.REWARDS_NONE: len(rewards) - len(given) - failed,
        names.REWARDS_FAILED: failed,
        **_deviation(names.REWARD_STD, given),
        **group_metrics(groups, within),
    }


def _deviation(name: str, rewards: np.ndarray) -> dict[str, float]:
    """As that of a group, and TRL's, divided by one less than there are; none of fewer than two."""
    return {name: float(rewards.std(ddof=1))} if len(rewards) > 1 else {}
