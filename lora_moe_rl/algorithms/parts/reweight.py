"""Samples of a step drawn once more by their rewards, so that some stand in its loss several times
and some not at all: the reweighting of PF-PPO (Policy Filtration, arXiv:2409.06957), as verl has it
(compute_pf_ppo_reweight_data). Pure, numpy, on the host.
"""

from __future__ import annotations

import numpy as np

from lora_moe_rl.config import Reweight

FLOOR = 1e-8  # no sample is quite impossible, and rewards of 0 alone are all alike (verl's value)


def weights(rewards: np.ndarray, how: Reweight, power: float) -> np.ndarray:
    """float64 [n], of which the chance of each sample is a share. rewards: float64 [n], all given.

    pow: |reward| to the power. max_min: 1 for the largest and the smallest reward, 0 for others.
    max_random: 0.4 for the largest reward, 0.1 for others.
    """
    if how == "pow":
        found = np.abs(rewards) ** power
    elif how == "max_min":
        found = ((rewards == rewards.max()) | (rewards == rewards.min())).astype(np.float64)
    else:
        found = np.where(rewards == rewards.max(), 0.4, 0.1)
    return found + FLOOR


def draw(
    rewards: np.ndarray, how: Reweight, power: float, draws: np.random.Generator
) -> np.ndarray:
    """int64 [n], how many times each sample was drawn, of as many draws as there are rewards.
    rewards: float64 [n]; NaN for a sample that is not to be drawn."""
    copies, given = np.zeros(len(rewards), np.int64), ~np.isnan(rewards)
    if given.any():
        chances = weights(rewards[given], how, power)
        copies[given] = draws.multinomial(given.sum(), chances / chances.sum())
    return copies
