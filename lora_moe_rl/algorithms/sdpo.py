"""Self-distillation policy optimization (SDPO, arXiv:2601.20802): the policy is its own teacher,
which reads a solution of another sample of the prompt, or feedback, and each token is pushed by how
much likelier it is then. The gradient is weighed with the ratio to the engine that sampled, cut off
at algorithm.ratio_max."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class SelfDistillation(PolicyGradient):
    defaults = {
        "advantage": "self_teacher",
        "loss": "cispo",
        "anchor": "rollout",
        "ratio_max": 2.0,
        "aggregation": "seq-mean-token-mean",
    }
