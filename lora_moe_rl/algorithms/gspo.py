"""GSPO (arXiv:2507.18071): one ratio a sample, with the narrow bounds of the paper."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class GSPO(PolicyGradient):
    defaults = {
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "seq-mean-token-mean",
    }
