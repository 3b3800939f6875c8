"""MaxRL (arXiv:2602.02710): rewards against their group's mean, divided by it, so that hard prompts
weigh more; a clipped ratio."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class MaxRL(PolicyGradient):
    defaults = {"advantage": "max_rl"}
