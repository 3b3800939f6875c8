"""GRPO (arXiv:2402.03300): rewards against their group, a clipped ratio, and a KL to the base.

The loss is a mean over tokens, not over samples first, as in DAPO (arXiv:2503.14476): each token of
the step weighs the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from lora_moe_rl.algorithms.base import Algorithm, Loss, Pass, Reduce, Signal, Tokens
from lora_moe_rl.algorithms.parts.advantages import group_normalized
from lora_moe_rl.algorithms.parts.kl import reference_kl
from lora_moe_rl.algorithms.parts.policy_loss import clipped_policy_loss
from lora_moe_rl.config import AlgorithmConfig
from lora_moe_rl.data.samples import Group


class GRPO(Algorithm):
    class Settings(AlgorithmConfig):
        clip_low: float = Field(
            0.2, ge=0, lt=1, description="The ratio is clipped below at 1 - clip_low."
        )
        clip_high: float = Field(
            0.2, ge=0, description="The ratio is clipped above at 1 + clip_high."
        )
        normalize_std: bool = Field(True, description="Divide advantages by the group's deviation.")
        kl_coef: float = Field(
            0.0, ge=0, description="Weight of the KL to the base (adapters off)."
        )

    settings: Settings
    metrics: ClassVar[Mapping[str, Reduce]] = {
        "policy": "token_mean",
        "kl": "token_mean",
        "ratio": "token_mean",
        "clipped_low": "token_mean",
        "clipped_high": "token_mean",
    }

    @property
    def passes(self) -> frozenset[Pass]:
        return frozenset({"reference"} if self.settings.kl_coef else ())

    def signal(self, group: Group) -> Signal:
        advantages = group_normalized(group.rewards, self.settings.normalize_std)
        return Signal.of_samples(group, advantages)

    def loss(self, tokens: Tokens) -> Loss:
        settings = self.settings
        policy, sums = clipped_policy_loss(tokens, settings.clip_low, settings.clip_high)
        kl = reference_kl(tokens, settings.kl_coef)
        total = policy + settings.kl_coef * kl if settings.kl_coef else policy
        return Loss(total, {"policy": policy.detach(), "kl": kl.detach(), **sums})
