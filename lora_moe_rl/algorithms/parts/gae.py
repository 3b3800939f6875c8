"""Generalized advantage estimation (arXiv:1506.02438). Pure, numpy, on the host.

delta_t = reward_t + gamma value_{t+1} - value_t and A_t = delta_t + gamma lambda A_{t+1}, over the
tokens that the policy wrote: those of others are no time steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def estimate(
    rewards: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    gamma: float,
    lambdas: np.ndarray,
) -> list[np.ndarray]:
    """Advantages, float64 [R] of each sample, 0 outside its mask; an advantage and its value
    together are the return. With values of 0 and lambdas of 1 it is the discounted reward to come.

    rewards, values: [R] of each sample. masks: bool [R], True for tokens that the policy wrote.
    lambdas: float64 [n], of each sample. Raises ValueError for values of another length.
    """
    for number, (value, mask) in enumerate(zip(values, masks, strict=True)):
        if len(value) != len(mask):
            raise ValueError(f"sample {number} has {len(mask)} tokens, and {len(value)} values")
    steps = max((int(mask.sum()) for mask in masks), default=0)
    reward, value = (_at_the_end(each, masks, steps) for each in (rewards, values))
    found = np.zeros_like(reward)
    after, value_after = np.zeros(len(masks)), np.zeros(len(masks))
    for t in reversed(range(steps)):
        delta = reward[:, t] + gamma * value_after - value[:, t]
        after = found[:, t] = delta + gamma * lambdas * after
        value_after = value[:, t]
    out = []
    for mask, row in zip(masks, found, strict=True):
        one = np.zeros(len(mask))
        one[mask] = row[steps - int(mask.sum()) :]
        out.append(one)
    return out


def _at_the_end(
    streams: Sequence[np.ndarray], masks: Sequence[np.ndarray], steps: int
) -> np.ndarray:
    """float64 [n, steps]: what is in each mask, so that all samples end together."""
    found = np.zeros((len(masks), steps))
    for row, stream, mask in zip(found, streams, masks, strict=True):
        inside = np.asarray(stream, np.float64)[mask]
        row[steps - len(inside) :] = inside
    return found
