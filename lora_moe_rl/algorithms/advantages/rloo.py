"""reward - mean reward of the group's other samples (RLOO, arXiv:2402.14740)."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.algorithms.advantages.base import Advantage


class LeaveOneOut(Advantage):
    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return (rewards - rewards.mean()) * (rewards.size / (rewards.size - 1))
