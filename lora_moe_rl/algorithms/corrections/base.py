"""What a correction is: importance weights of trainer against engine, bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from lora_moe_rl.algorithms.parts import by_sample
from lora_moe_rl.algorithms.parts.part import LOG_BOUND, Part

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class Correction(Part):
    """Base of all corrections. The weights multiply each token's loss, and leave what the loss is
    divided by as it is: to take tokens out is a rejection."""

    corrects: ClassVar[bool] = True  # False for none
    level: ClassVar[Literal["token", "sequence"]] = "token"
    metrics = {
        "weight": "token_mean",
        "weight_squared": "token_mean",
        "weight_largest": "max",
        "weight_bounded": "token_mean",
    }

    def ratio(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """The unbounded weight [T]. log_ratio [T]: trainer's minus engine's logprob, 0 outside the
        mask, without gradient."""
        raise NotImplementedError

    def bounded(self, ratio: Tensor) -> Tensor:
        """What the weight becomes [T]."""
        raise NotImplementedError

    def weights(self, log_ratio: Tensor, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The weights [T], and metrics [T] of the bounded weight and of how many were bounded."""
        ratio = self.ratio(log_ratio, tokens)
        weights = self.bounded(ratio)
        return weights, {
            "weight": weights,
            "weight_squared": weights * weights,
            "weight_largest": ratio,
            "weight_bounded": (weights != ratio).float(),
        }


class OfTokens(Correction):
    """exp(log ratio) of each token by itself: little variance, biased."""

    def ratio(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        return log_ratio.clamp(-LOG_BOUND, LOG_BOUND).exp()


class OfSamples(Correction):
    """The product over the sample's tokens: unbiased, much variance."""

    level = "sequence"

    def ratio(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        return by_sample.total(log_ratio, tokens).clamp(-LOG_BOUND, LOG_BOUND).exp()
