"""IcePop (Ling team, arXiv:2510.18855): a token's weight, or 0 where it is out of bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from lora_moe_rl.algorithms.corrections.base import OfTokens, WeightSettings

if TYPE_CHECKING:
    from torch import Tensor


class TokenMask(OfTokens):
    class Settings(WeightSettings):
        correction_min: float = Field(0.5, gt=0, description="Smallest weight that is not 0.")
        correction_max: float = Field(5.0, gt=0, description="Largest weight that is not 0.")

        @model_validator(mode="after")
        def _band(self):
            if self.correction_min >= self.correction_max:
                raise ValueError(
                    f"algorithm.correction_min={self.correction_min:g} is not below "
                    f"correction_max={self.correction_max:g}; both are absolute ratios"
                )
            return self

    settings: Settings

    def bounded(self, ratio: Tensor) -> Tensor:
        low, high = self.settings.correction_min, self.settings.correction_max
        return ratio.where((ratio >= low) & (ratio <= high), 0.0)
