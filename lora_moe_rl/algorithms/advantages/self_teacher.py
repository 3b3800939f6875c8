"""What the policy itself would rather have said, had it read more: its logprob of each sampled
token behind another prompt, with a solution of another sample or with feedback, less that behind
its own (self-distillation: SDPO, arXiv:2601.20802). Of a sample that has nothing more to read all
are 0."""

from __future__ import annotations

from lora_moe_rl.algorithms.parts.taught import Taught
from lora_moe_rl.config.teacher import SelfTeacherSettings


class FromItself(Taught):
    class Settings(Taught.Settings, SelfTeacherSettings):
        pass
