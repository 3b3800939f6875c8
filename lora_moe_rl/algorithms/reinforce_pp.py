"""REINFORCE++ (arXiv:2501.03262): rewards whitened over the tokens of the step, a clipped ratio, no
groups needed; a KL to the base, if it is asked for, is taken from the reward of each token."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class ReinforcePP(PolicyGradient):
    defaults = {"advantage": "reinforce_pp", "kl_in": "reward"}
