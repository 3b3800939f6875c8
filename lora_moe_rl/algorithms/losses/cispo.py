"""CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE weighed with the ratio, which is cut off but
never takes a token's gradient away. The bounds are absolute ratios; ScaleRL (arXiv:2510.13786)
finds 4, 5 and 8 alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.losses.base import PolicyLoss, ratio_of
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class CISPO(PolicyLoss):
    class Settings(Section):
        ratio_min: float = Field(
            0.0, ge=0, le=1, description="A token's ratio weighs at least this."
        )
        ratio_max: float = Field(5.0, ge=1, description="A token's ratio weighs at most this.")

    settings: Settings
    of_moved = ("ratio_min", "ratio_max")
    metrics = {"ratio": "token_mean", "clipped_low": "token_mean", "clipped_high": "token_mean"}

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        low, high = self.settings.ratio_min, self.settings.ratio_max
        ratio = ratio_of(tokens).detach()
        values = -(ratio.clamp(low, high) * tokens.advantages * tokens.logprobs)
        return values, {
            "ratio": ratio,
            "clipped_low": (ratio < low).float(),
            "clipped_high": (ratio > high).float(),
        }
