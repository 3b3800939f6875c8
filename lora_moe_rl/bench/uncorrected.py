"""A correction that is none, and says that it is one: what a run without would have done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_moe_rl.algorithms.corrections.base import OfTokens

if TYPE_CHECKING:
    from torch import Tensor


class Uncorrected(OfTokens):
    """Every token weighs 1. The metrics are those of the weights that it should have had."""

    def bounded(self, ratio: Tensor) -> Tensor:
        return ratio.new_ones(ratio.shape)
