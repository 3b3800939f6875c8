"""reward - group mean, whitened over the tokens of the step (REINFORCE++ with a baseline,
arXiv:2501.03262)."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.algorithms.advantages.base import Advantage, Rewarded, whitened


class WhitenedBaseline(Advantage):
    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return rewards - rewards.mean()

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        return whitened(super().of_step(step), step)
