"""What an advantage makes of a teacher's logprobs: how much likelier the teacher finds each sampled
token than the policy did. Nothing is summed over later tokens (discount 0) and nothing is whitened.
A reward's advantages, against the group as in GRPO, may come on top."""

from __future__ import annotations

from typing import cast

import numpy as np
from pydantic import Field, model_validator

from lora_moe_rl.algorithms.advantages.base import Rewarded
from lora_moe_rl.algorithms.advantages.grpo import GroupNormalized


class Taught(GroupNormalized):
    compares_group = False
    needs_teacher = True

    class Settings(GroupNormalized.Settings):
        reward_weight: float = Field(
            0.0,
            ge=0,
            description="What a reward's advantages, against the group, weigh beside those of the "
            "teacher; 0: they teach nothing.",
        )

        @model_validator(mode="after")
        def _reward_is_read(self):
            if self.normalize_std != "group" and not self.reward_weight:
                raise ValueError(
                    f"algorithm.normalize_std={self.normalize_std} has no effect with algorithm."
                    "reward_weight=0: no reward is compared"
                )
            return self

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        """Raises ValueError without a teacher's logprobs."""
        if step.teacher is None or step.logprobs is None:
            raise ValueError(
                "an advantage from a teacher needs its logprobs of the samples; there are none"
            )
        given = zip(step.teacher, step.logprobs, strict=True)
        found = [teacher.astype(np.float64) - logprobs for teacher, logprobs in given]
        weight = cast(Taught.Settings, self.settings).reward_weight
        if not weight:
            return found
        of_rewards = super().of_step(step)
        return [a + weight * reward for a, reward in zip(found, of_rewards, strict=True)]
