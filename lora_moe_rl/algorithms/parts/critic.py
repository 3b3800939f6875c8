"""An algorithm with a critic: adapters of its own and a value head, on the same frozen base.

Its values make the advantages, and it learns the returns beside the policy: on the samples of each
optimizer step, before the policy does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from lora_moe_rl.algorithms.advantages.base import ValueAdvantage
from lora_moe_rl.algorithms.base import Known, Pass, Signal
from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient
from lora_moe_rl.algorithms.parts.settings import PolicyGradientConfig
from lora_moe_rl.algorithms.parts.turns import earned_before_the_end
from lora_moe_rl.config import AlgorithmConfig
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.data.samples import Group


class CriticSettings(PolicyGradientConfig):
    has_critic = True

    critic_lr: float | None = Field(
        None, gt=0, description="Peak learning rate of the critic; null: trainer.lr."
    )
    critic_warmup: int = Field(
        0, ge=0, description="Steps of the run, its first ones, in which the critic alone learns."
    )
    value_clip: float | None = Field(
        0.5,  # verl's value
        gt=0,
        description="How far a value may move from the one before the update; null: any way.",
    )
    critic_routes: Literal["free", "rollout"] = Field(
        "free",
        description="Which experts the critic's forwards use: those that the routers choose by "
        "themselves, or the rollout's (with replay.mode=r3).",
    )

    @model_validator(mode="after")
    def _values_are_read(self):
        if not PARTS["advantage"].find(self.advantage).needs_values:
            raise ValueError(
                f"algorithm={self.name} trains a critic, and algorithm.advantage={self.advantage} "
                "does not read its values; take advantage=gae or length_adaptive_gae, or an "
                "algorithm without a critic"
            )
        return self


class ActorCritic(PolicyGradient):
    Settings: ClassVar[type[AlgorithmConfig]] = CriticSettings

    @property
    def critic(self) -> CriticSettings:
        assert isinstance(self.settings, CriticSettings)
        return self.settings

    @property
    def passes(self) -> frozenset[Pass]:
        values: frozenset[Pass] = frozenset({"values"})
        return super().passes | values

    @property
    def revises(self) -> bool:
        return True

    def signals(self, groups: Sequence[Group]) -> list[Signal]:
        """Rewards alone: advantages wait for the critic's values."""
        found = []
        for group in groups:
            zeros = Signal.of_samples(group, np.zeros(len(group.samples)))
            rewards, earlier = self.rewards(group), earned_before_the_end(group)
            found.append(Signal(zeros.advantages, zeros.weights, rewards, earlier=earlier))
        return found

    def returns(self, step: Known) -> list[np.ndarray]:
        assert isinstance(self._advantage, ValueAdvantage)
        return self._advantage.returns(self._rewarded(step))
