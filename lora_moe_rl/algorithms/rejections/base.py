"""What a rejection is: tokens that leave the loss.

One of the policy before the update takes them out of what the loss is divided by too. One of the
policy that is updated, whose tokens are known when the loss is made, gives them a loss of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from lora_moe_rl.algorithms.parts.part import LOG_BOUND, Part, check_bounds
from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


class Rejection(Part):
    """Base of all rejections. `level`: what it takes out, tokens or whole samples. `of_updated`:
    whether it is asked in each loss, of the policy that is updated; any is with anchor=rollout."""

    rejects: ClassVar[bool] = True  # False for none
    of_updated: ClassVar[bool] = False
    level: ClassVar[Literal["token", "sequence"]] = "sequence"

    def keep(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """bool [T], False for tokens that are taken out. log_ratio [T]: trainer's minus engine's
        logprob, 0 outside the mask, without gradient."""
        raise NotImplementedError


def kept_by(rejections: Sequence[Rejection], log_ratio: Tensor, tokens: Tokens) -> Tensor:
    """bool [T]: tokens in the loss that all of them keep."""
    stay = tokens.mask
    for rejection in rejections:
        stay = stay & rejection.keep(log_ratio, tokens)
    return stay


class BandSettings(Section):
    """A band of a ratio, which the subclass gives its defaults. k1 is the ratio itself."""

    rejection_divergence: Literal["k1", "k2", "k3"] = Field(
        "k1",
        description="What is bounded: the ratio itself (k1, bounds are ratios), its squared log / "
        "2 (k2) or ratio - 1 - log ratio (k3), which have an upper bound alone.",
    )
    rejection_min: float | None = Field(
        None, gt=0, description="Smallest ratio that stays; null: 1 / rejection_max (k1 alone)."
    )
    rejection_max: float = Field(2.0, gt=0, description="Largest ratio or divergence that stays.")

    @model_validator(mode="after")
    def _band(self):
        low, high = self.rejection_min, self.rejection_max
        if self.rejection_divergence == "k1":
            if low is None and high <= 1:
                raise ValueError(
                    f"algorithm.rejection_max={high:g} is no upper bound of a ratio (k1): it must "
                    "be above 1"
                )
            check_bounds("rejection", low, high)
        elif low is not None:
            raise ValueError(
                f"algorithm.rejection_min={low:g} has no effect with rejection_divergence="
                f"{self.rejection_divergence}, which is 0 when the policies are equal and has an "
                "upper bound alone"
            )
        elif "rejection_max" not in self.model_fields_set:
            raise ValueError(
                f"algorithm.rejection_divergence={self.rejection_divergence} wants a rejection_max "
                f"of its own: the default, {high:g}, is one of the ratio, and would reject hardly "
                "anything; verl's for the mean of k3 is 0.01"
            )
        return self


def divergence(log_ratio: Tensor, kind: str) -> Tensor:
    """k1 (the log ratio itself), k2 or k3 of each token [T]."""
    bounded = log_ratio.clamp(-LOG_BOUND, LOG_BOUND)
    if kind == "k1":
        return bounded
    return 0.5 * bounded * bounded if kind == "k2" else bounded.expm1() - bounded


def within(found: Tensor, settings: BandSettings) -> Tensor:
    """Whether a divergence, or a sum or mean of them, is within the bounds."""
    if settings.rejection_divergence != "k1":
        return found <= settings.rejection_max
    low = settings.rejection_min or 1.0 / settings.rejection_max
    return (found >= math.log(low)) & (found <= math.log(settings.rejection_max))
