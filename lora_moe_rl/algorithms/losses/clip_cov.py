"""Clip-Cov (arXiv:2505.22617; verl's clip_cov): PPO's clipped objective, without the gradient of a
few tokens, drawn from those whose covariance of advantage and logprob is between two bounds.

A likely token that is made likelier takes the policy's entropy away, and so does an unlikely one
that is made unlikelier: (A - mean A)(logprob - mean logprob) tells how much. The means are over the
tokens in the loss of the optimizer step. What loses its gradient still counts in what the loss is
divided by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field, model_validator

from lora_moe_rl.algorithms.losses.base import PolicyLoss, ratio_of, selected_of
from lora_moe_rl.algorithms.losses.ppo_clip import ClipSettings, clipped
from lora_moe_rl.algorithms.parts.part import LOG_BOUND
from lora_moe_rl.algorithms.parts.selection import Selection, covariances, drawn, share_of

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens
    from lora_moe_rl.algorithms.parts.selection import StepTokens


class ClipCov(PolicyLoss):
    class Settings(ClipSettings):
        clip_cov_ratio: float = Field(
            2e-4,
            gt=0,
            le=1,
            description="Share of an optimizer step's tokens that lose their gradient, at most.",
        )
        clip_cov_lb: float = Field(1.0, description="Their covariance is above this.")
        clip_cov_ub: float = Field(5.0, description="Their covariance is below this.")

        @model_validator(mode="after")
        def _band(self):
            if self.clip_cov_lb >= self.clip_cov_ub:
                raise ValueError(
                    f"algorithm.clip_cov_lb={self.clip_cov_lb:g} is not below clip_cov_ub="
                    f"{self.clip_cov_ub:g}, and no token is between them"
                )
            return self

    settings: Settings
    of_moved = ("clip_low", "clip_high")
    metrics = {"ratio": "token_mean", "clipped_low": "token_mean", "clipped_high": "token_mean"}

    def select(self, tokens: StepTokens) -> Selection:
        """But for tokens whose gradient the clip removes anyway."""
        settings, found = self.settings, covariances(tokens)
        ratio = np.exp((tokens.logprobs - tokens.old).clip(-LOG_BOUND, LOG_BOUND))
        held = ratio.clip(1.0 - settings.clip_low, 1.0 + settings.clip_high)
        free = held * tokens.advantages >= ratio * tokens.advantages
        within = (found > settings.clip_cov_lb) & (found < settings.clip_cov_ub) & free
        number = share_of(len(found), settings.clip_cov_ratio)
        return Selection(
            drawn(within, number, tokens.lots),
            {
                "covariance": float(found.mean()),
                "covariance_largest": float(found.max()),
                "covariance_within": float(within.mean()),
            },
        )

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        values, metrics = clipped(ratio_of(tokens), tokens.advantages, self.settings)
        return values * (1.0 - selected_of(tokens)), metrics
