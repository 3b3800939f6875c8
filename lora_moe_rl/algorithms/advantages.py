"""Advantages of samples against the other samples of their prompt.

Shape letter: N samples of one step.
"""

from __future__ import annotations

import numpy as np

# Keeps the division finite; rewards are of order one. (verl's value.)
STD_EPS = 1e-6


def group_normalized(
    rewards: np.ndarray, groups: np.ndarray, normalize_std: bool
) -> tuple[np.ndarray, np.ndarray]:
    """GRPO's advantage (arXiv:2402.03300): (reward - group mean) / group deviation.

    `rewards` is float [N] with NaN for a sample that has none; `groups` is int [N]. Returns
    advantages, float32 [N], and a keep mask, bool [N], which is False exactly where the reward is
    NaN: such a sample says nothing about the others and gets advantage 0. A group with fewer than
    two rewards, or with equal ones, has nothing to compare and gets 0 throughout.

    `normalize_std=False` leaves the deviation out, as Dr. GRPO does (arXiv:2503.20783): groups with
    little spread then weigh little. The deviation is the sample's (n - 1), as in TRL and verl.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    groups = np.asarray(groups)
    if rewards.shape != groups.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {rewards.shape} and groups {groups.shape} must both be [N]")
    keep = ~np.isnan(rewards)
    advantages = np.zeros(rewards.shape, dtype=np.float32)
    for group in np.unique(groups[keep]):
        members = keep & (groups == group)
        values = rewards[members]
        if values.max() == values.min():  # also true of a single one
            continue
        centered = values - values.mean()
        if normalize_std:
            centered /= values.std(ddof=1) + STD_EPS
        advantages[members] = centered
    return advantages, keep
