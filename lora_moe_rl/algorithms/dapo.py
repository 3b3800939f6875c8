"""DAPO (arXiv:2503.14476): GRPO with a higher upper clip, a mean over tokens, groups without signal
drawn again, and rewards that sink near the longest response (set algorithm.overlong_buffer)."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient


class DAPO(PolicyGradient):
    defaults = {"clip_high": 0.28, "draw_again": 10}
