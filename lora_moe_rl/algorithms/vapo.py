"""VAPO (arXiv:2504.05118): PPO whose lambda grows with the length of the sample, with a critic that
learns alone at first, a higher upper clip and a mean over tokens. The paper's loss on right samples
is not here."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.critic import ActorCritic


class VAPO(ActorCritic):
    defaults = {"advantage": "length_adaptive_gae", "clip_high": 0.28, "critic_warmup": 50}
