"""IcePop (Ling team, arXiv:2510.18855): a token's weight, or 0 where it is out of bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.corrections.base import BoundSettings, OfTokens, masked

if TYPE_CHECKING:
    from torch import Tensor


class TokenMask(OfTokens):
    class Settings(BoundSettings):
        correction_min: float | None = Field(
            0.5, gt=0, description="Smallest weight that is not 0; null: none."
        )
        correction_max: float = Field(5.0, gt=0, description="Largest weight that is not 0.")

    settings: Settings

    def bounded(self, ratio: Tensor) -> Tensor:
        return masked(ratio, self.settings)
