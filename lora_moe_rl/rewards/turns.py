"""Whether rewards of turns are those of a sample."""

from __future__ import annotations

from collections.abc import Sequence

SAME_SUM = 1e-6


def fault_of(turns: Sequence[float], number: int, reward: float) -> str:
    """Why `turns` cannot be the rewards of the `number` turns of a sample with this reward; '' when
    they can."""
    if len(turns) != number:
        return f"told of {len(turns)} turns, and the policy has had {number} in this sample"
    if abs(sum(turns) - reward) > SAME_SUM * max(1.0, abs(reward)):
        return (
            f"gave its turns {sum(turns):g} together, and {reward:g} in all: the reward of a "
            "sample is the sum of its turns'"
        )
    return ""
