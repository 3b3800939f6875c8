"""Samples of which one token is out of bounds, whatever the others are (SkyRL's outlier mask; with
k2 and k3 verl's seq_max)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.parts import by_sample
from lora_moe_rl.algorithms.rejections.base import BandSettings, Rejection, divergence, within

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class Veto(Rejection):
    class Settings(BandSettings):
        rejection_min: float | None = Field(
            None, gt=0, description="Smallest ratio of a token; null: 1 / rejection_max (k1 alone)."
        )
        rejection_max: float = Field(
            1e4, gt=0, description="Largest ratio or divergence of a token."
        )

    settings: Settings

    def keep(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        each = divergence(log_ratio, self.settings.rejection_divergence)
        out = ~within(each, self.settings) & tokens.mask
        return by_sample.largest(out.to(log_ratio.dtype), tokens) == 0
