"""RLOO (arXiv:2402.14740): each reward against the mean of the group's other samples, and the
clipped ratio for several updates of one rollout, as verl's `rloo` estimator has it; a KL to the
base, if it is asked for, is taken from the reward."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class RLOO(PolicyGradient):
    defaults = {"advantage": "rloo", "kl_in": "reward"}
