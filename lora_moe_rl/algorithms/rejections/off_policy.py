"""Samples with a negative advantage that the policy has become too unlikely to write
(DeepSeek-V3.2's off-policy sequence masking, arXiv:2512.02556; TRL's off_policy_mask_threshold), by
the engine's logprobs and those of the policy that is updated: in each of several updates anew.
Where the tokens of a sample have advantages of their own, their sum says which it is: whole samples
leave, whatever the advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.parts import by_sample
from lora_moe_rl.algorithms.rejections.base import Rejection
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class OffPolicy(Rejection):
    class Settings(Section):
        rejection_max: float = Field(
            0.5,  # of TRL's example: it has to be above what rounding puts between the engines
            gt=0,
            description="Largest mean of engine's minus trainer's logprob that stays.",
        )

    settings: Settings
    of_updated = True

    def keep(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        far = by_sample.mean(-log_ratio, tokens) > self.settings.rejection_max
        return ~(far & (by_sample.total(tokens.advantages, tokens) < 0))
