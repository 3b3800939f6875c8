"""CISPO (arXiv:2506.13585): GRPO's advantages, REINFORCE weighed with a cut-off ratio."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class CISPO(PolicyGradient):
    defaults = {"loss": "cispo"}
