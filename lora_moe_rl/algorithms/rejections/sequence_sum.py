"""Samples whose summed divergence is out of bounds (verl's seq_sum_k1: the product of ratios)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_moe_rl.algorithms.parts import by_sample
from lora_moe_rl.algorithms.rejections.base import BandSettings, Rejection, divergence, within

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class OfProducts(Rejection):
    Settings = BandSettings
    settings: BandSettings

    def keep(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        each = divergence(log_ratio, self.settings.rejection_divergence)
        return within(by_sample.total(each, tokens), self.settings)
