"""Tokens whose divergence is out of bounds (verl's token_k1, token_k2, token_k3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_moe_rl.algorithms.rejections.base import BandSettings, Rejection, divergence, within

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class OfTokens(Rejection):
    Settings = BandSettings
    settings: BandSettings
    level = "token"

    def keep(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        return within(divergence(log_ratio, self.settings.rejection_divergence), self.settings)
