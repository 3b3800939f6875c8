"""Each reward function normalized over its group, then the weighted sum, whitened over the tokens
of the step (GDPO, arXiv:2601.05242): functions of different scale and spread all have their say."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.algorithms.advantages.base import Advantage, Rewarded, whitened
from lora_moe_rl.errors import RewardError

STD_EPS = 1e-6  # as in GRPO


class Decoupled(Advantage):
    separates_rewards = True

    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Of the rewards of one function."""
        return (rewards - rewards.mean()) / (rewards.std(ddof=1) + STD_EPS)

    def of_samples(self, step: Rewarded) -> np.ndarray:
        """A function that gives all samples of a group the same, or a sample None, adds nothing.
        Raises ValueError where rewards are not the weighted sum of what the functions gave."""
        failed = np.isnan(step.rewards)
        parts = [np.where(failed, np.nan, one) for one in step.by_function]
        _check_sum(step, parts)
        found = np.zeros(len(step.rewards))
        for weight, part in zip(step.weights, parts, strict=True):
            found += weight * self.compared(part, step)
        return found

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        return whitened(super().of_step(step), step)


def _check_sum(step: Rewarded, parts: list[np.ndarray]) -> None:
    """An environment may change rewards, and here the change would be lost: raises RewardError."""
    given = ~np.isnan(step.rewards)
    total = sum(
        (w * np.nan_to_num(part[given]) for w, part in zip(step.weights, parts, strict=True)),
        np.zeros(given.sum()),
    )
    if not np.allclose(total, step.rewards[given], rtol=1e-4, atol=1e-5):
        raise RewardError(
            "algorithm.advantage=gdpo normalizes what each reward function gave, and the rewards "
            "are not their weighted sum: the environment has changed them; make that a function "
            "of reward.functions, or take advantage=grpo"
        )
