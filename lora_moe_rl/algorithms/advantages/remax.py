"""reward - reward of a greedy sample of the prompt (ReMax, arXiv:2310.10505)."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.algorithms.advantages.base import Advantage, Rewarded


class AgainstGreedy(Advantage):
    compares_group = False
    greedy_baseline = True

    def of_samples(self, step: Rewarded) -> np.ndarray:
        """Raises ValueError for a sample that has a reward and no baseline."""
        rewards = step.of_samples()
        if step.baselines is None or np.isnan(step.baselines[~np.isnan(rewards)]).any():
            raise ValueError(
                "algorithm.advantage=remax needs the reward of a greedy sample of each prompt "
                "(Group.baseline); it is missing"
            )
        return np.nan_to_num(rewards - step.baselines)
