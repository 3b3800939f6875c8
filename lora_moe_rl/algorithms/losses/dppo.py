"""DPPO (arXiv:2602.04879): REINFORCE weighed with the ratio, without the tokens whose probability
has moved too far already in their advantage's direction. How far is the divergence of two coins
that say this token or another: total variation, or KL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lora_moe_rl.algorithms.losses.base import PolicyLoss, ratio_of
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens

RATIO_BOUND = 20.0
EPS = 1e-8  # a probability of 1 leaves nothing to the other side of the coin


class DPPO(PolicyLoss):
    class Settings(Section):
        divergence: Literal["tv", "kl"] = Field(
            "tv", description="How the probabilities of a token are compared."
        )
        divergence_max: float = Field(
            0.2, gt=0, description="Largest divergence of a token that is still trained."
        )

    settings: Settings
    of_moved = ("divergence", "divergence_max")
    metrics = {"ratio": "token_mean", "masked_far": "token_mean"}

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, advantages = ratio_of(tokens).detach(), tokens.advantages
        new, old = tokens.logprobs.detach().exp(), tokens.old.exp()
        if self.settings.divergence == "tv":
            apart = (new - old).abs()
        else:
            unsaid = ((1.0 - old + EPS) / (1.0 - new + EPS)).log()
            apart = old * (tokens.old - tokens.logprobs.detach()) + (1.0 - old) * unsaid
        away = ((new > old) & (advantages > 0)) | ((new < old) & (advantages < 0))
        far = away & (apart > self.settings.divergence_max)
        values = -(ratio.clamp(max=RATIO_BOUND) * advantages * tokens.logprobs)
        return values.where(~far, 0.0), {"ratio": ratio, "masked_far": far.float()}
