"""VAPO's advantages (arXiv:2504.05118): GAE with a lambda that grows with the sample's length, and
returns for the critic with one of their own."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from lora_moe_rl.algorithms.advantages.base import GAESettings, ValueAdvantage


class LengthAdaptiveGAE(ValueAdvantage):
    class Settings(GAESettings):
        length_alpha: float = Field(
            0.05,
            gt=0,
            description="The policy's lambda of a sample of n tokens is 1 - 1 / (length_alpha n), "
            "at least 0.",
        )
        lambda_value: float = Field(
            1.0, ge=0, le=1, description="Lambda of the returns that the critic learns."
        )

    settings: Settings

    def policy_lambdas(self, lengths: np.ndarray) -> np.ndarray:
        """0 up to 20 tokens, 0.5 at 40 and 0.98 at 1,000, with an alpha of 0.05."""
        return 1.0 - 1.0 / np.maximum(self.settings.length_alpha * lengths, 1.0)

    def value_lambda(self) -> float:
        return self.settings.lambda_value
