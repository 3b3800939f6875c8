"""(reward - group mean) / deviation of the group (GRPO, arXiv:2402.03300), or of the whole step
(TRL's scale_rewards=batch; arXiv:2508.08221)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from lora_moe_rl.algorithms.advantages.base import Advantage, Rewarded
from lora_moe_rl.algorithms.base import apart
from lora_moe_rl.config.section import Section

# Keeps the division finite; rewards are of order one. (verl's value.)
STD_EPS = 1e-6


class GroupNormalized(Advantage):
    class Settings(Section):
        normalize_std: Literal["group", "step", "none"] = Field(
            "group",
            description="Divide advantages by the deviation of the group's rewards (true means the "
            "same) or of all of the step's; Dr. GRPO (arXiv:2503.20783) divides by none (or "
            "false), so that groups with little spread weigh little.",
        )

        @field_validator("normalize_std", mode="before")
        @classmethod
        def _or_not(cls, value: Any) -> Any:
            if not isinstance(value, str | bool):
                return value
            return {"true": "group", "false": "none"}.get(str(value).lower(), value)

    settings: Settings

    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The deviation is the sample's (n - 1), as in TRL and verl."""
        centered = rewards - rewards.mean()
        if self.settings.normalize_std == "group":
            centered /= rewards.std(ddof=1) + STD_EPS
        return centered

    def of_penalties(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Never divided by the group's deviation, which would be that of the penalties alone, and
        make advantages of order one of them, however small they are."""
        return rewards - rewards.mean()

    def compared(self, every: np.ndarray, step: Rewarded) -> np.ndarray:
        """With normalize_std=step all groups are divided by one deviation, the sample's of all
        rewards of the step; by none where those are all equal."""
        found = super().compared(every, step)
        within: float = getattr(self.settings, "equal_within")  # noqa: B009 (of the algorithm)
        if self.settings.normalize_std == "step" and apart(step.rewards, within):
            found /= every[~np.isnan(every)].std(ddof=1) + STD_EPS
        return found
