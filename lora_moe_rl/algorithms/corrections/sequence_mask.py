"""Masked importance sampling by sample (MIS, richardli.xyz/rl-collapse; TRL's sequence_mask): the
product of a sample's weights, or 0 where it is out of bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.corrections.base import BoundSettings, OfSamples, masked

if TYPE_CHECKING:
    from torch import Tensor


class SequenceMask(OfSamples):
    class Settings(BoundSettings):
        correction_min: float | None = Field(
            None, gt=0, description="Smallest weight that is not 0; null: none."
        )
        correction_max: float = Field(3.0, gt=0, description="Largest weight that is not 0.")

    settings: Settings

    def bounded(self, ratio: Tensor) -> Tensor:
        return masked(ratio, self.settings)
