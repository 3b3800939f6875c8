"""What each turn brought: its reward and those of later turns, discounted by turn, against the same
turn of the group's other samples, as GRPO compares whole samples.

    G[k] = r[k] + turn_gamma G[k + 1]           r: rewards of turns, 0 where none is told
    A[k] = (G[k] - mean) / deviation            over the samples of the group that have a turn k

All tokens of a turn have its advantage. A turn that no other sample of the group has has nothing to
be compared with, and an advantage of 0.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from pydantic import Field, model_validator

from lora_moe_rl.algorithms.advantages.base import Rewarded
from lora_moe_rl.algorithms.advantages.grpo import GroupNormalized
from lora_moe_rl.algorithms.base import apart
from lora_moe_rl.config import AlgorithmConfig


class ByTurn(GroupNormalized):
    compares_turns = True

    class Settings(GroupNormalized.Settings):
        turn_gamma: float = Field(
            1.0, ge=0, le=1, description="Discount of what a turn earned by each turn before it."
        )

        @model_validator(mode="after")
        def _of_its_group(self):
            if self.normalize_std == "step":
                raise ValueError(
                    "algorithm.normalize_std=step is the deviation of whole samples' rewards, and "
                    "algorithm.advantage=turns compares turns; take group or none"
                )
            return self

    @property
    def by_token(self) -> bool:
        return True

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        """Raises ValueError without numbers of turns."""
        if step.turns is None:
            raise ValueError("algorithm.advantage=turns needs the tokens' turns; they are missing")
        found = [np.zeros(len(mask)) for mask in step.masks]
        within = cast(AlgorithmConfig, self.settings).equal_within
        ahead = returns(step, cast(ByTurn.Settings, self.settings).turn_gamma)
        for group in np.unique(step.groups):
            mine = np.flatnonzero((step.groups == group) & ~np.isnan(step.rewards))
            most = max((len(ahead[i]) for i in mine), default=0)
            for turn in range(most):
                places = {i: step.masks[i] & (step.turns[i] == turn) for i in mine}
                # In the loss: one that was left out is compared with none.
                have = [i for i in mine if places[i].any()]
                earned = np.array([ahead[i][turn] for i in have])
                if not apart(earned, within):
                    continue
                lengths = np.array([places[i].sum() for i in have])
                for i, one in zip(have, self.of_group(earned, lengths), strict=True):
                    found[i][places[i]] = one
        return found


def returns(step: Rewarded, gamma: float) -> list[np.ndarray]:
    """float64 [turns] of each sample: what was earned in each turn and, discounted, after it."""
    assert step.turns is not None
    found = []
    for each, mask, turns in zip(step.of_tokens(), step.masks, step.turns, strict=True):
        own = np.bincount(turns[mask], each[mask])
        for turn in reversed(range(len(own) - 1)):
            own[turn] += gamma * own[turn + 1]
        found.append(own)
    return found
