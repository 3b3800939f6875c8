"""The rewards of several functions as one: the weighted sum. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_rl.config import RewardFunction
from lora_moe_rl.data.scores import Details, FunctionRewards, Scores


def combine(functions: Sequence[RewardFunction], scores: Sequence[Scores]) -> Scores:
    """What each of `functions` gave a group's samples, as one.

    A function that does not apply to a sample (None) adds nothing to its sum, and a sample to which
    none applies has no reward. Where one has failed the sample has failed, since a sum without it
    would be of something else. Functions of weight 0 are on record and change nothing.
    """
    total = np.zeros(len(scores[0].rewards), dtype=np.float64)
    given = np.zeros(len(total), dtype=bool)
    details = Details()
    for function, one in zip(functions, scores, strict=True):
        reasons = one.details.reasons
        details.by_function[function.name] = FunctionRewards(
            function.weight, one.rewards, len(reasons), next(reversed(reasons.values()), "")
        )
        details.extra.update(_named(function, one.details.extra))
        details.metrics.update(_named(function, one.details.metrics))
        if not function.weight:
            continue
        applies = ~np.isnan(one.rewards)
        total[applies] += function.weight * one.rewards[applies].astype(np.float64)
        given |= applies
        for index, reason in reasons.items():
            details.reasons.setdefault(index, reason)
    details.by_turn.update(_by_turn(functions, scores))
    failed = np.isin(np.arange(len(total)), list(details.reasons))
    rewards = np.where(given & ~failed, total, np.nan).astype(np.float32)
    failures = [details.reasons[index] for index in sorted(details.reasons)]
    return Scores(rewards, failures, details)


def _by_turn(
    functions: Sequence[RewardFunction], scores: Sequence[Scores]
) -> dict[int, list[float]]:
    """The weighted sums of what functions tell of turns; what tells nothing of them has given its
    reward at the end."""
    found: dict[int, np.ndarray] = {}
    for function, one in zip(functions, scores, strict=True):
        for index, turns in one.details.by_turn.items() if function.weight else ():
            found[index] = found.get(index, 0) + function.weight * np.array(turns)
    for function, one in zip(functions, scores, strict=True):
        for index, total in found.items():
            if index not in one.details.by_turn and not np.isnan(one.rewards[index]):
                total[-1] += function.weight * float(one.rewards[index])
    return {index: total.tolist() for index, total in found.items()}


def _named[T](function: RewardFunction, values: dict[str, T]) -> dict[str, T]:
    return {f"{function.name}/{key}": value for key, value in values.items()}
