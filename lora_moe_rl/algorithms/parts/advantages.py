"""Advantages of samples against the other samples of their prompt. Shape letter: n samples."""

from __future__ import annotations

import numpy as np

# Keeps the division finite; rewards are of order one. (verl's value.)
STD_EPS = 1e-6


def group_normalized(rewards: np.ndarray, normalize_std: bool) -> np.ndarray:
    """GRPO's advantage (arXiv:2402.03300): (reward - group mean) / group deviation.

    `rewards` is float [n] with NaN for a sample that has none: it says nothing about the others and
    gets advantage 0. A group with fewer than two rewards, or with equal ones, has nothing to
    compare and gets 0 throughout. Returns float32 [n].

    `normalize_std=False` leaves the deviation out, as Dr. GRPO does (arXiv:2503.20783): groups with
    little spread then weigh little. The deviation is the sample's (n - 1), as in TRL and verl.
    """
    values, given, advantages = _given(rewards)
    if values.size and values.max() != values.min():
        centered = values - values.mean()
        if normalize_std:
            centered /= values.std(ddof=1) + STD_EPS
        advantages[given] = centered
    return advantages


def leave_one_out(rewards: np.ndarray) -> np.ndarray:
    """RLOO's advantage (arXiv:2402.14740): reward - mean reward of the group's other samples.

    Missing rewards and groups with nothing to compare are treated as by `group_normalized`. Returns
    float32 [n].
    """
    values, given, advantages = _given(rewards)
    if values.size and values.max() != values.min():
        advantages[given] = (values - values.mean()) * (values.size / (values.size - 1))
    return advantages


def _given(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rewards there are (float64), where they are, and advantages of 0."""
    rewards = np.asarray(rewards, dtype=np.float64)
    given = ~np.isnan(rewards)
    return rewards[given], given, np.zeros(rewards.shape, dtype=np.float32)
