"""What a teacher would rather have said: its logprob of each sampled token less the policy's, which
is minus the reverse KL's estimate from that token alone (on-policy distillation, Thinking Machines
2025, https://thinkingmachines.ai/blog/on-policy-distillation/)."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.taught import Taught
from lora_moe_rl.config.teacher import TeacherSettings


class FromTeacher(Taught):
    class Settings(Taught.Settings, TeacherSettings):
        pass
