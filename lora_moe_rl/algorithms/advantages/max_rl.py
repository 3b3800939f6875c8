"""(reward - group mean) / group mean (MaxRL, arXiv:2602.02710): for rewards that are 0 or more."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.algorithms.advantages.base import Advantage
from lora_moe_rl.errors import RewardError

MEAN_EPS = 1e-6


class MaxRL(Advantage):
    takes_negative = False

    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Raises RewardError for a negative reward, of which the mean says nothing."""
        if rewards.min() < 0:
            raise RewardError(
                f"algorithm.advantage=max_rl divides by the mean reward of a group and takes no "
                f"negative rewards; one is {rewards.min():g}. Take another algorithm, or a reward "
                "that begins at 0; the run goes on with --resume"
            )
        return (rewards - rewards.mean()) / (rewards.mean() + MEAN_EPS)
