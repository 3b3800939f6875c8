"""Discounted rewards, whitened over the tokens of the step (REINFORCE++, arXiv:2501.03262)."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from lora_moe_rl.algorithms.advantages.base import Advantage, Rewarded, whitened
from lora_moe_rl.algorithms.parts import gae
from lora_moe_rl.config.section import Section


class Whitened(Advantage):
    compares_group = False

    class Settings(Section):
        gamma: float = Field(
            1.0, gt=0, le=1, description="Discount of the reward by each token before the last."
        )

    settings: Settings

    @classmethod
    def by_token(cls, settings: Any) -> bool:
        return settings.gamma < 1 or (settings.kl_in == "reward" and settings.kl_coef > 0)

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        """Tokens of others than the policy are no time steps."""
        nothing = [np.zeros(len(mask)) for mask in step.masks]
        ones = np.ones(len(step.masks))
        returns = gae.estimate(step.of_tokens(), nothing, step.masks, self.settings.gamma, ones)
        return whitened(returns, step)
