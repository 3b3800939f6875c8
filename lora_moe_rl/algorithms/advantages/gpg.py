"""reward - group mean, times the step's samples over those of groups that tell theirs apart (GPG,
arXiv:2504.02546): groups of equal rewards, which have no gradient, do not make that of the others
smaller. Meant for loss=reinforce."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.algorithms.advantages.base import Advantage, Rewarded
from lora_moe_rl.algorithms.base import apart


class GroupPolicyGradient(Advantage):
    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return rewards - rewards.mean()

    def compared(self, every: np.ndarray, step: Rewarded) -> np.ndarray:
        given = ~np.isnan(every)
        tells = [
            apart(every[step.groups == group], self.settings.equal_within)
            for group in np.unique(step.groups)
        ]
        told_apart = given & np.isin(step.groups, np.unique(step.groups)[tells])
        return super().compared(every, step) * (given.sum() / max(told_apart.sum(), 1))
