"""Truncated importance sampling by token (TIS, fengyao.notion.site/off-policy-rl): min(w, max),
and at least correction_min where one is set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_moe_rl.algorithms.corrections.base import BoundSettings, OfTokens

if TYPE_CHECKING:
    from torch import Tensor


class TokenTruncate(OfTokens):
    Settings = BoundSettings
    settings: BoundSettings

    def bounded(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(self.settings.correction_min, self.settings.correction_max)
