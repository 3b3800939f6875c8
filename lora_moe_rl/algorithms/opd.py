"""On-policy distillation (Thinking Machines 2025): a teacher scores what the policy has sampled,
and each token is pushed by how much likelier the teacher finds it. The policy gradient is weighed
with the ratio to the engine that sampled, cut off at algorithm.ratio_max."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class OnPolicyDistillation(PolicyGradient):
    defaults = {"advantage": "teacher", "loss": "cispo", "anchor": "rollout"}
