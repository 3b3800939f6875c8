"""A weight of the KL that follows the KL (Ziegler et al., arXiv:1909.08593, section 2.2): above the
target it grows, below it it falls.

    error    = clip(KL / target - 1, -0.2, 0.2)
    kl_coef <- kl_coef (1 + error samples / horizon)

as verl's AdaptiveKLController has it (verl/trainer/ppo/core_algos.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lora_moe_rl.errors import CheckpointError

KEY = "kl_coef"  # in a checkpoint's metadata
LARGEST_ERROR = 0.2


@dataclass
class KLControl:
    """`coef`: of the next step. `samples`: those of a step."""

    coef: float
    target: float
    horizon: float
    samples: int

    def follow(self, kl: float) -> None:
        """After a step whose KL, the mean over tokens, was this. A NaN changes nothing."""
        if math.isnan(kl):
            return
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        self.coef *= 1 + error * self.samples / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {KEY: self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Of a checkpoint of a run that has none nothing is taken. Raises CheckpointError for what
        is no weight."""
        if (coef := state.get(KEY)) is None:
            return
        if not (math.isfinite(coef) and coef > 0):
            raise CheckpointError(f"the checkpoint's {KEY} is {coef!r}, which is no weight of a KL")
        self.coef = float(coef)
