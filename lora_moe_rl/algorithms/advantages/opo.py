"""reward - mean reward of the group's tokens (OPO, arXiv:2505.23585): the baseline of least
variance weighs each sample with its length."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.algorithms.advantages.base import Advantage


class LengthWeighted(Advantage):
    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        total = lengths.sum()
        if not total:
            return np.zeros_like(rewards)
        return rewards - (rewards * lengths).sum() / total
