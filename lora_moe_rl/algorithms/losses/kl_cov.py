"""KL-Cov (arXiv:2505.22617; verl's kl_cov): the ratio's objective without a clip, with a penalty on
how far the logprob has moved, of the few tokens that have the largest covariance of advantage and
logprob in the optimizer step (see clip_cov.py).

loss = -ratio A + ppo_kl_coef |log ratio|, the latter of the tokens that are selected
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.losses.base import PolicyLoss, ratio_of, selected_of
from lora_moe_rl.algorithms.parts.selection import Selection, covariances, largest, share_of
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens
    from lora_moe_rl.algorithms.parts.selection import StepTokens


class KLCov(PolicyLoss):
    class Settings(Section):
        kl_cov_ratio: float = Field(
            2e-4,
            gt=0,
            le=1,
            description="Share of an optimizer step's tokens that are penalised.",
        )
        ppo_kl_coef: float = Field(
            0.1,  # of verl's config; null is 1 there
            gt=0,
            description="Weight of their |log ratio|.",
        )

    settings: Settings
    needs_moved = True
    metrics = {"ratio": "token_mean", "log_ratio_size": "token_mean"}

    def select(self, tokens: StepTokens) -> Selection:
        found = covariances(tokens)
        chosen = largest(found, share_of(len(found), self.settings.kl_cov_ratio), tokens.lots)
        return Selection(
            chosen,
            {
                "covariance": float(found.mean()),
                "covariance_largest": float(found.max()),
                "covariance_threshold": float(found[chosen].min()),
            },
        )

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, size = ratio_of(tokens), (tokens.logprobs - tokens.old).abs()
        penalty = self.settings.ppo_kl_coef * size * selected_of(tokens)
        return penalty - ratio * tokens.advantages, {
            "ratio": ratio.detach(),
            "log_ratio_size": size.detach(),
        }
