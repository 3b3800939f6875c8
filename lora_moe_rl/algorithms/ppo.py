"""PPO (arXiv:1707.06347): advantages by GAE from a critic's values, and a clipped ratio."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.critic import ActorCritic


class PPO(ActorCritic):
    defaults = {"advantage": "gae"}
