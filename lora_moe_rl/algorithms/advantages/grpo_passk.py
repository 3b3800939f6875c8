"""Of each group the best sample alone is pushed, by how much better it is than the second best,
over the group's deviation: what it adds to the best of k (arXiv:2503.19595; verl's grpo_passk)."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.algorithms.advantages.grpo import STD_EPS, GroupNormalized


class BestOfGroup(GroupNormalized):
    """A group of several best samples has an advantage for none."""

    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        found = _lead(rewards)
        if self.settings.normalize_std == "group":
            found /= rewards.std(ddof=1) + STD_EPS
        return found

    def of_penalties(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return _lead(rewards)


def _lead(rewards: np.ndarray) -> np.ndarray:
    """float64 [k], of k rewards, at least two: 0 but at the largest, which has what it is larger by
    than the next."""
    found, best = np.zeros(len(rewards)), int(rewards.argmax())
    found[best] = rewards[best] - np.delete(rewards, best).max()
    return found
