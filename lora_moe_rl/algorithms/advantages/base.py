"""What an advantage is: rewards of a step's samples to one number a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from lora_moe_rl.algorithms.parts.part import Part


@dataclass(frozen=True)
class Rewarded:
    """The samples of a step. rewards: float64 [n], NaN for none. groups: int [n], the number of
    each sample's group. masks: bool [R] a sample, True for tokens that the policy wrote."""

    rewards: np.ndarray
    groups: np.ndarray
    masks: Sequence[np.ndarray]


class Advantage(Part):
    """Base of all advantages. Most compare the samples of a group and write `of_group`; those that
    need the whole step write `of_step`.

    `compares_group`: whether one sample a prompt is too few.
    """

    compares_group: ClassVar[bool] = True

    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Advantages [k] of the k samples of one group that have a reward, which are at least two
        and not all equal. rewards: float64 [k]. lengths: int [k], tokens that the policy wrote."""
        raise NotImplementedError

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        """float64 [R] of each sample. What it says of samples without a reward does not count."""
        each = self.of_samples(step)
        return [np.full(len(mask), one) for mask, one in zip(step.masks, each, strict=True)]

    def of_samples(self, step: Rewarded) -> np.ndarray:
        """float64 [n]: 0 for a sample without a reward, which says nothing about the others, and
        for all of a group that has nothing to compare."""
        found = np.zeros(len(step.rewards))
        given = ~np.isnan(step.rewards)
        lengths = np.array([mask.sum() for mask in step.masks], dtype=np.int64)
        for group in np.unique(step.groups):
            mine = np.flatnonzero(given & (step.groups == group))
            rewards = step.rewards[mine]
            if len(rewards) > 1 and rewards.max() != rewards.min():
                found[mine] = self.of_group(rewards, lengths[mine])
        return found


def whitened(values: Sequence[np.ndarray], step: Rewarded) -> list[np.ndarray]:
    """`values` [R] of each sample, with mean 0 and deviation 1 over all tokens that a policy wrote
    in samples with a reward: the deviation is the sample's (n - 1), as in verl."""
    masks = [mask & ~np.isnan(r) for mask, r in zip(step.masks, step.rewards, strict=True)]
    every = np.concatenate([v[m] for v, m in zip(values, masks, strict=True)])
    if len(every) < 2:
        return [np.zeros(len(value)) for value in values]
    scale = 1.0 / np.sqrt(every.var(ddof=1) + 1e-8)
    return [(value - every.mean()) * scale for value in values]
