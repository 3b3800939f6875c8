"""What a step's groups hold beside their rewards, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.data.samples import Group


def baselines_of(groups: Sequence[Group]) -> np.ndarray:
    """float64 [n], each sample's, NaN for none."""
    each = [np.nan if group.baseline is None else group.baseline for group in groups]
    return np.repeat(np.array(each, np.float64), [len(group.samples) for group in groups])


def each_function(groups: Sequence[Group]) -> dict[str, tuple[float, np.ndarray]]:
    """The weight of each of several reward functions, and what it gave the samples of all groups:
    float64 [n], NaN for none. Those of weight 0 are left out."""
    every = [one for group in groups for one in group.details.by_function.items()]
    found = {}
    for name, weight in {name: one.weight for name, one in every if one.weight}.items():
        values = []
        for group in groups:
            own = group.details.by_function.get(name)
            none = np.full(len(group.samples), np.nan)
            values.append(none if own is None else np.asarray(own.rewards, np.float64))
        found[name] = weight, np.concatenate(values)
    return found


def of_teacher(groups: Sequence[Group]) -> list[np.ndarray]:
    """The teacher's logprobs of the samples of all groups, float32 [R] each. Raises ValueError for
    a group that no teacher has scored."""
    found = []
    for group in groups:
        if group.teacher is None:
            raise ValueError(f"prompt {group.prompt.number}: no teacher has scored its samples")
        found += group.teacher
    return found


def of_those_taught(signal: Signal, group: Group) -> Signal:
    """Without samples of which a teacher that is the policy itself has nothing to say: what it
    finds likely is nothing's there."""
    if group.taught is None:
        return signal
    pairs = zip(signal.weights, group.taught, strict=True)
    return replace(signal, weights=[one if taught else 0 * one for one, taught in pairs])
