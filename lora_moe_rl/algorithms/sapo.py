"""SAPO (arXiv:2511.20347): GRPO's advantages, a soft gate in the place of the clip."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class SAPO(PolicyGradient):
    defaults = {"loss": "sapo", "aggregation": "seq-mean-token-mean"}
