"""Truncated importance sampling by sample (verl's rollout_is=sequence): min(product of w, max),
and at least correction_min where one is set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_moe_rl.algorithms.corrections.base import BoundSettings, OfSamples

if TYPE_CHECKING:
    from torch import Tensor


class SequenceTruncate(OfSamples):
    Settings = BoundSettings
    settings: BoundSettings

    def bounded(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(self.settings.correction_min, self.settings.correction_max)
