"""Generalized advantage estimation (arXiv:1506.02438), whitened over the tokens of the step, as PPO
has it in verl and TRL: lambda 1 weighs what came of a token, less the critic's next value."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from lora_moe_rl.algorithms.advantages.base import GAESettings, ValueAdvantage


class GAE(ValueAdvantage):
    class Settings(GAESettings):
        lambda_policy: float = Field(
            1.0, ge=0, le=1, description="Lambda of the policy's advantages."
        )
        lambda_value: float | None = Field(
            None,
            ge=0,
            le=1,
            description="Lambda of the returns that the critic learns; null: lambda_policy.",
        )

    settings: Settings

    def policy_lambdas(self, lengths: np.ndarray) -> np.ndarray:
        return np.full(len(lengths), self.settings.lambda_policy)

    def value_lambda(self) -> float:
        given = self.settings.lambda_value
        return self.settings.lambda_policy if given is None else given
