"""SAPO (arXiv:2511.20347): a soft gate in the place of the clip, sigmoid(tau (ratio - 1)) 4 / tau,
with a sharper one for negative advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.losses.base import PolicyLoss, ratio_of
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class SAPO(PolicyLoss):
    class Settings(Section):
        tau_positive: float = Field(
            1.0, gt=0, description="Sharpness of the gate under a positive advantage."
        )
        tau_negative: float = Field(
            1.05, gt=0, description="Sharpness of the gate under any other advantage."
        )

    settings: Settings
    of_moved = ("tau_positive", "tau_negative")
    metrics = {"ratio": "token_mean", "gate": "token_mean"}

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, advantages = ratio_of(tokens), tokens.advantages
        positive = (advantages > 0).to(ratio.dtype)
        tau = self.settings.tau_negative + positive * (
            self.settings.tau_positive - self.settings.tau_negative
        )
        gate = (tau * (ratio - 1.0)).sigmoid() * (4.0 / tau)
        return -gate * advantages, {"ratio": ratio.detach(), "gate": gate.detach()}
