"""GMPO (arXiv:2507.20673; verl's geo_mean): the geometric mean of a sample's ratios, each of which
is clipped before, weighs the sample's advantage.

Every token has the loss of its sample, with the gradient of all of its tokens, so that the paper's
mean over samples is aggregation=seq-mean-token-mean. The bounds are of the log ratio: 0.4 are
ratios of 0.67 to 1.49, wider than PPO's since one token moves a mean little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.losses.base import PolicyLoss
from lora_moe_rl.algorithms.parts import by_sample
from lora_moe_rl.algorithms.parts.part import LOG_BOUND
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class GMPO(PolicyLoss):
    class Settings(Section):
        log_clip_low: float = Field(
            0.4, ge=0, description="Log ratios are clipped below at -log_clip_low."
        )
        log_clip_high: float = Field(
            0.4, ge=0, description="Log ratios are clipped above at log_clip_high."
        )

    settings: Settings
    of_moved = ("log_clip_low", "log_clip_high")
    level = "sequence"
    averages_advantages = True
    metrics = {"ratio": "token_mean", "clipped_low": "token_mean", "clipped_high": "token_mean"}

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        low, high = -self.settings.log_clip_low, self.settings.log_clip_high
        log_ratio, up = tokens.logprobs - tokens.old, tokens.advantages.sign()
        worse = up * (up * log_ratio).minimum(up * log_ratio.clamp(low, high))
        ratio = by_sample.mean(worse, tokens).clamp(-LOG_BOUND, LOG_BOUND).exp()
        was = log_ratio.detach()
        return -by_sample.mean(tokens.advantages, tokens) * ratio, {
            "ratio": ratio.detach(),
            "clipped_low": ((was < low) & (up < 0)).float(),
            "clipped_high": ((was > high) & (up > 0)).float(),
        }
