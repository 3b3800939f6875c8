"""RLOO (arXiv:2402.14740): each reward against the mean of the group's other samples, and the
clipped ratio for several updates of one rollout, as verl's `rloo` estimator has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from lora_moe_rl.algorithms.base import Algorithm, Loss, Reduce, Signal, Tokens
from lora_moe_rl.algorithms.parts.advantages import leave_one_out
from lora_moe_rl.algorithms.parts.policy_loss import clipped_policy_loss
from lora_moe_rl.config import AlgorithmConfig
from lora_moe_rl.data.samples import Group


class RLOO(Algorithm):
    class Settings(AlgorithmConfig):
        clip_low: float = Field(
            0.2, ge=0, lt=1, description="The ratio is clipped below at 1 - clip_low."
        )
        clip_high: float = Field(
            0.2, ge=0, description="The ratio is clipped above at 1 + clip_high."
        )

    settings: Settings
    metrics: ClassVar[Mapping[str, Reduce]] = {
        "policy": "token_mean",
        "ratio": "token_mean",
        "clipped_low": "token_mean",
        "clipped_high": "token_mean",
    }

    def signal(self, group: Group) -> Signal:
        return Signal.of_samples(group, leave_one_out(group.rewards))

    def loss(self, tokens: Tokens) -> Loss:
        policy, sums = clipped_policy_loss(tokens, self.settings.clip_low, self.settings.clip_high)
        return Loss(policy, {"policy": policy.detach(), **sums})
