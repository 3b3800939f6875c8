"""GRPO (arXiv:2402.03300): rewards against their group, a clipped ratio, and a KL to the base.

The loss is a mean over tokens, not over samples first, as in DAPO (arXiv:2503.14476): each token of
the step weighs the same.
"""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class GRPO(PolicyGradient):
    pass
