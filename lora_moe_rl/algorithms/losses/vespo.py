"""VESPO (arXiv:2602.10693; TRL's loss_type=vespo): REINFORCE weighed with a smooth function of the
sample's ratio W, the product over its tokens, in the place of a clip:

    phi(W) = exp(lambda) W^k exp(-lambda W)        1 at W = 1, largest at W = k / lambda
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from lora_moe_rl.algorithms.losses.base import PolicyLoss
from lora_moe_rl.algorithms.parts import by_sample
from lora_moe_rl.algorithms.parts.part import LOG_BOUND
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens

LOWEST = math.log(1e-8)  # of the log ratio of a sample (TRL's value)


class VESPO(PolicyLoss):
    class Settings(Section):
        vespo_k_positive: float = Field(
            2.0, ge=0, description="k of samples whose advantage is 0 or more."
        )
        vespo_lambda_positive: float = Field(3.0, gt=0, description="lambda of the same.")
        vespo_k_negative: float = Field(3.0, ge=0, description="k of a negative advantage.")
        vespo_lambda_negative: float = Field(2.0, gt=0, description="lambda of the same.")

    settings: Settings
    of_moved = tuple(Settings.model_fields)
    level = "sequence"
    metrics = {"ratio": "token_mean", "phi": "token_mean"}

    def values(self, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        was = (tokens.logprobs.detach() - tokens.old).clamp(-LOG_BOUND, LOG_BOUND)
        log_ratio = by_sample.total(was, tokens).clamp(LOWEST, LOG_BOUND)
        ratio, settings = log_ratio.exp(), self.settings
        positive = (tokens.advantages >= 0).to(ratio.dtype)

        def of_sign(for_positive: float, for_negative: float) -> Tensor:
            return for_negative + positive * (for_positive - for_negative)

        k = of_sign(settings.vespo_k_positive, settings.vespo_k_negative)
        rate = of_sign(settings.vespo_lambda_positive, settings.vespo_lambda_negative)
        phi = (rate + k * log_ratio - rate * ratio).exp()
        return -phi * tokens.advantages * tokens.logprobs, {"ratio": ratio, "phi": phi}
