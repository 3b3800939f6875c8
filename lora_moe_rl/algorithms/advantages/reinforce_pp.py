"""Discounted rewards, whitened over the tokens of the step (REINFORCE++, arXiv:2501.03262)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from lora_moe_rl.algorithms.advantages.base import Advantage, Rewarded, whitened
from lora_moe_rl.config.section import Section


class Whitened(Advantage):
    compares_group = False

    class Settings(Section):
        gamma: float = Field(
            1.0, gt=0, le=1, description="Discount of the reward by each token before the last."
        )

    settings: Settings

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        """Tokens of others than the policy are no time steps."""
        returns = []
        for mask, reward in zip(step.masks, step.rewards, strict=True):
            still_to_come = mask[::-1].cumsum()[::-1] - mask
            returns.append(np.nan_to_num(reward) * self.settings.gamma**still_to_come)
        return whitened(returns, step)
