"""Truncated importance sampling by token (TIS, fengyao.notion.site/off-policy-rl): min(w, max)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.corrections.base import OfTokens, WeightSettings

if TYPE_CHECKING:
    from torch import Tensor


class TokenTruncate(OfTokens):
    class Settings(WeightSettings):
        correction_max: float = Field(2.0, gt=0, description="Largest weight, a ratio.")

    settings: Settings

    def bounded(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(max=self.settings.correction_max)
