"""Dr. GRPO (arXiv:2503.20783): GRPO without what its authors found to be biased: no division by the
group's deviation, and every token divided by one constant, the longest response."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class DrGRPO(PolicyGradient):
    defaults = {"normalize_std": "none", "aggregation": "seq-mean-token-sum-norm"}
