"""What a correction is: importance weights of trainer against engine, bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lora_moe_rl.algorithms.base import Reduce
from lora_moe_rl.algorithms.parts import by_sample
from lora_moe_rl.algorithms.parts.part import LOG_BOUND, Part, check_bounds
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


SMALLEST_MEAN = 1e-8  # a smaller mean of weights divides nothing (verl's value)


class WeightSettings(Section):
    """What a correction has that can divide its weights by their mean."""

    correction_normalize: bool = Field(
        False,
        description="Divide the bounded weights by their mean over the step before rejection: over "
        "tokens, or over samples for a weight a sample (verl's rollout_is_batch_normalize).",
    )


class BoundSettings(WeightSettings):
    """What a correction has that bounds its weights."""

    correction_min: float | None = Field(
        None, gt=0, description="Smallest weight, an absolute ratio; null: none."
    )
    correction_max: float = Field(2.0, gt=0, description="Largest weight, an absolute ratio.")

    @model_validator(mode="after")
    def _bounds(self):
        check_bounds("correction", self.correction_min, self.correction_max)
        return self


class Correction(Part):
    """Base of all corrections. The weights multiply each token's loss, and leave what the loss is
    divided by as it is: to take tokens out is a rejection."""

    Settings: ClassVar[type[Section]] = WeightSettings
    corrects: ClassVar[bool] = True  # False for none
    level: ClassVar[Literal["token", "sequence"]] = "token"
    metrics = {
        "weight": "token_mean",
        "weight_squared": "token_mean",
        "weight_largest": "max",
        "weight_bounded": "token_mean",
    }

    def __init__(self, settings: Any):
        super().__init__(settings)
        self.normalizes: bool = (
            isinstance(settings, WeightSettings) and settings.correction_normalize
        )
        if self.normalizes:
            of_norm: dict[str, Reduce] = {"weight_norm": "token_mean"}
            self.metrics = {**self.metrics, **of_norm}

    def ratio(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """The unbounded weight [T]. log_ratio [T]: trainer's minus engine's logprob, 0 outside the
        mask, without gradient."""
        raise NotImplementedError

    def bounded(self, ratio: Tensor) -> Tensor:
        """What the weight becomes [T]."""
        raise NotImplementedError

    def weights(self, log_ratio: Tensor, tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The weights [T], and metrics [T] of the bounded weight and of how many were bounded.
        Raises ValueError when they are to be divided by a mean that is not there."""
        ratio = self.ratio(log_ratio, tokens)
        weights = self.bounded(ratio)
        metrics = {
            "weight": weights,
            "weight_squared": weights.double() ** 2,  # the deviation is a difference of means
            "weight_largest": ratio,
            "weight_bounded": (weights != ratio).float(),
        }
        if not self.normalizes:
            return weights, metrics
        mean = tokens.step_mean
        if mean is None:
            raise ValueError("algorithm.correction_normalize=true, but the step's mean is missing")
        norm = mean if mean > SMALLEST_MEAN else 1.0
        return weights / norm, metrics | {"weight_norm": weights.new_full(weights.shape, norm)}

    def averaged(self, log_ratio: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Two streams [T] whose sums over the step, divided by each other, are the mean of the
        bounded weights."""
        weights = self.bounded(self.ratio(log_ratio, tokens))
        share = weights.new_ones(weights.shape)
        if self.level == "sequence":
            share = 1.0 / by_sample.total(share, tokens).clamp(min=1.0)
        return weights * share, share


class OfTokens(Correction):
    """exp(log ratio) of each token by itself: little variance, biased."""

    def ratio(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        return log_ratio.clamp(-LOG_BOUND, LOG_BOUND).exp()


class OfSamples(Correction):
    """The product over the sample's tokens: unbiased, much variance."""

    level = "sequence"

    def ratio(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        return by_sample.total(log_ratio, tokens).clamp(-LOG_BOUND, LOG_BOUND).exp()


def masked(ratio: Tensor, settings: BoundSettings) -> Tensor:
    """`ratio` where it is within the bounds, 0 elsewhere."""
    return ratio.where(
        (ratio >= (settings.correction_min or 0)) & (ratio <= settings.correction_max), 0.0
    )
