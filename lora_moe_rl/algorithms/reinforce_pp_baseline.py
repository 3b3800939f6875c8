"""REINFORCE++ with a baseline (arXiv:2501.03262): rewards against their group's mean, then
whitened over the tokens of the step; a clipped ratio, and a KL to the base if it is asked for."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class ReinforcePPBaseline(PolicyGradient):
    defaults = {"advantage": "reinforce_pp_baseline", "kl_estimator": "k2"}
