"""What each turn brought: its reward and those of later turns, discounted by turn, against the same
turn of the group's other samples, as GRPO compares whole samples.

    G[k] = r[k] + turn_gamma G[k + 1]           r: rewards of turns, 0 where none is told
    A[k] = (G[k] - mean) / deviation            over the samples of the group that have a turn k

All tokens of a turn have its advantage, which is 0 where it is compared with no other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, cast

import numpy as np
from pydantic import Field, model_validator

from lora_moe_rl.algorithms.advantages.base import Rewarded
from lora_moe_rl.algorithms.advantages.grpo import GroupNormalized
from lora_moe_rl.algorithms.base import apart
from lora_moe_rl.config import AlgorithmConfig
from lora_moe_rl.data.samples import Sample


class ByTurn(GroupNormalized):
    compares_turns = True

    class Settings(GroupNormalized.Settings):
        turn_gamma: float = Field(
            1.0, ge=0, le=1, description="Discount of what a turn earned by each turn before it."
        )

        @model_validator(mode="after")
        def _of_its_group(self):
            if self.normalize_std == "step":
                name = getattr(self, "advantage")  # noqa: B009 (of the algorithm)
                raise ValueError(
                    "algorithm.normalize_std=step is the deviation of whole samples' rewards, and "
                    f"algorithm.advantage={name} compares turns; take group or none"
                )
            return self

    @classmethod
    def turn_keys(cls, sample: Sample) -> Sequence[Hashable]:
        return range(len(sample.turn_ends))

    @classmethod
    def by_token(cls, settings: Any) -> bool:
        return True

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        """Raises ValueError without turns and their keys."""
        if step.turns is None or step.turn_keys is None:
            name = getattr(self.settings, "advantage")  # noqa: B009 (of the algorithm)
            raise ValueError(
                f"algorithm.advantage={name} needs the tokens' turns; they are missing"
            )
        found = [np.zeros(len(mask)) for mask in step.masks]
        within = cast(AlgorithmConfig, self.settings).equal_within
        ahead = returns(step, cast(ByTurn.Settings, self.settings).turn_gamma)
        for group in np.unique(step.groups):
            alike: dict[Hashable, list[tuple[int, int, np.ndarray]]] = defaultdict(list)
            for i in np.flatnonzero((step.groups == group) & ~np.isnan(step.rewards)):
                for turn, key in enumerate(step.turn_keys[i]):
                    places = step.masks[i] & (step.turns[i] == turn)
                    if places.any():  # in the loss: one that was left out is compared with none
                        alike[key].append((i, turn, places))
            for turns in alike.values():
                earned = np.array([ahead[i][turn] for i, turn, _ in turns])
                if not apart(earned, within):
                    continue
                lengths = np.array([places.sum() for *_, places in turns])
                for (i, _, places), one in zip(turns, self.of_group(earned, lengths), strict=True):
                    found[i][places] = one
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
