"""Distillation (arXiv:2306.13649; TRL's DistillationTrainer): the divergence of the policy from a
teacher at each token, of the teacher's likeliest tokens and all others together. The gradient goes
through the policy's probabilities of all of them, and not by which token was sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.losses.base import PolicyLoss
from lora_moe_rl.algorithms.parts.divergence import Divergence
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class Distill(PolicyLoss):
    class Settings(Section):
        teacher_top_k: int = Field(
            20,  # as many as vLLM gives unless it is told otherwise
            ge=1,
            description="How many of the teacher's likeliest tokens are compared at each token.",
        )
        distill_beta: float = Field(
            1.0,  # TRL's default
            ge=0,
            le=1,
            description="0: the forward KL, from the teacher to the policy; 1: the reverse KL; "
            "between them the generalized Jensen-Shannon divergence.",
        )

    settings: Settings
    has_ratio = False
    of_any_policy = True
    metrics = {"divergence": "token_mean"}

    @property
    def divergence(self) -> Divergence:
        return Divergence(self.settings.teacher_top_k, self.settings.distill_beta)

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Raises ValueError where nobody has compared the policy with its teacher."""
        if tokens.divergence is None:
            raise ValueError("algorithm.loss=distill wants the tokens' divergence; it is missing")
        return tokens.divergence, {"divergence": tokens.divergence.detach()}
