"""A sample's advantage against its group, and that of each of its turns against all turns of the
group that began in the same state (GiGPO, arXiv:2505.10978).

    A = (R - mean) / deviation                     over the samples of the group
    G[k] = r[k] + turn_gamma G[k + 1]              r: rewards of turns, 0 where none is told
    S[k] = (G[k] - mean) / deviation               over the group's turns in the state of turn k
    advantage of all tokens of turn k: A + step_advantage_w S[k]

A state that a sample comes back to counts each time. A turn that is alone in its state has S = 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import cast

import numpy as np
from pydantic import Field

from lora_moe_rl.algorithms.advantages.base import Rewarded
from lora_moe_rl.algorithms.advantages.turns import ByTurn
from lora_moe_rl.data.samples import Sample


class ByState(ByTurn):
    class Settings(ByTurn.Settings):
        turn_gamma: float = Field(
            0.95, ge=0, le=1, description="Discount of what a turn earned by each turn before it."
        )
        step_advantage_w: float = Field(
            1.0,
            gt=0,
            description="Weight of a turn's advantage among those in its state, beside the "
            "sample's in its group.",
        )

    @classmethod
    def turn_keys(cls, sample: Sample) -> Sequence[Hashable]:
        return sample.turn_states

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        weight = cast(ByState.Settings, self.settings).step_advantage_w
        samples, turns = self.of_samples(step), super().of_step(step)
        return [
            mask * one + weight * own
            for mask, one, own in zip(step.masks, samples, turns, strict=True)
        ]
