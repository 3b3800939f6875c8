"""DRO (Direct Reward Optimisation, arXiv:2405.19107), as verl and Tinker have it for single tokens:
REINFORCE with a penalty on the squared log ratio, which keeps the policy near instead of a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.losses.base import PolicyLoss, ratio_of
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class DRO(PolicyLoss):
    class Settings(Section):
        dro_beta: float = Field(
            0.1, gt=0, description="Weight of half the squared log ratio of a token."
        )

    settings: Settings
    needs_moved = True
    metrics = {"ratio": "token_mean", "log_ratio_squared": "token_mean"}

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        squared = (tokens.logprobs - tokens.old).square()
        values = 0.5 * self.settings.dro_beta * squared - tokens.advantages * tokens.logprobs
        return values, {
            "ratio": ratio_of(tokens).detach(),
            "log_ratio_squared": squared.detach(),
        }
