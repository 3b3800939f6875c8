"""IcePop (Ling team, arXiv:2510.18855): a token's weight, or 0 where it is out of bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from lora_moe_rl.algorithms.corrections.base import BoundSettings, OfTokens
from lora_moe_rl.algorithms.parts.part import check_bounds

if TYPE_CHECKING:
    from torch import Tensor


class TokenMask(OfTokens):
    class Settings(BoundSettings):
        correction_min: float = Field(0.5, gt=0, description="Smallest weight that is not 0.")
        correction_max: float = Field(5.0, gt=0, description="Largest weight that is not 0.")

        @model_validator(mode="after")
        def _bounds(self):
            check_bounds("correction", self.correction_min, self.correction_max)
            return self

    settings: Settings

    def bounded(self, ratio: Tensor) -> Tensor:
        low, high = self.settings.correction_min, self.settings.correction_max
        return ratio.where((ratio >= low) & (ratio <= high), 0.0)
