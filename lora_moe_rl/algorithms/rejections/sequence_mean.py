"""Samples whose mean divergence is out of bounds (verl's seq_mean_k1: the geometric mean of ratios,
richardli.xyz/rl-collapse)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.parts import by_sample
from lora_moe_rl.algorithms.rejections.base import BandSettings, Rejection, divergence, within

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class OfMeans(Rejection):
    class Settings(BandSettings):
        rejection_max: float = Field(
            1.001, gt=0, description="Largest geometric mean of ratios, or mean divergence."
        )

    settings: Settings

    def keep(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        each = divergence(log_ratio, self.settings.rejection_divergence)
        return within(by_sample.mean(each, tokens), self.settings)
