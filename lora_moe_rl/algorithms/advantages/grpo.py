"""(reward - group mean) / group deviation (GRPO, arXiv:2402.03300)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from lora_moe_rl.algorithms.advantages.base import Advantage
from lora_moe_rl.config.section import Section

# Keeps the division finite; rewards are of order one. (verl's value.)
STD_EPS = 1e-6


class GroupNormalized(Advantage):
    class Settings(Section):
        normalize_std: bool = Field(
            True,
            description="Divide advantages by the group's deviation; Dr. GRPO (arXiv:2503.20783) "
            "does not, so that groups with little spread weigh little.",
        )

    settings: Settings

    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The deviation is the sample's (n - 1), as in TRL and verl."""
        centered = rewards - rewards.mean()
        if self.settings.normalize_std:
            centered /= rewards.std(ddof=1) + STD_EPS
        return centered

    def of_penalties(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Never divided: the deviation would be that of the penalties alone, and make advantages of
        order one of them, however small they are."""
        return rewards - rewards.mean()
