"""Distillation from distributions (arXiv:2306.13649, on the policy's own samples): at each token
that the policy has sampled, its divergence from a teacher's likeliest tokens is made small."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class Distillation(PolicyGradient):
    defaults = {"advantage": "teacher", "loss": "distill"}
