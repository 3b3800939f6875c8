"""The losses that a client of the service names, of single tokens; the loss is their sum.

Formulas and defaults as Tinker's documentation has them (tinker-docs.thinkingmachines.ai, losses).
Importing this file imports no torch: tensors bring their methods along.

Shape letter: T packed tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_moe_rl.errors import ServiceError

if TYPE_CHECKING:
    from torch import Tensor

Settings = Mapping[str, float]
# (logprobs with gradient, those that sampled, the coefficient, settings) -> the loss of each token.
Values = Callable[["Tensor", "Tensor", "Tensor", Settings], "Tensor"]


@dataclass(frozen=True)
class ServiceLoss:
    """`coefficient`: the input of a datum that each token's term is multiplied by. `compares`:
    whether it reads `logprobs`, those of the tokens when they were sampled. `settings`: those that
    there are, with their defaults."""

    values: Values
    coefficient: str = "advantages"
    compares: bool = True
    settings: Settings = None  # pyright: ignore[reportAssignmentType]

    @property
    def inputs(self) -> set[str]:
        return {self.coefficient, "logprobs"} if self.compares else {self.coefficient}


def _cross_entropy(logprobs: Tensor, before: Tensor, weights: Tensor, settings: Settings) -> Tensor:
    return -logprobs * weights


def _importance(logprobs: Tensor, before: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    return -(logprobs - before).exp() * advantages


def _ppo(logprobs: Tensor, before: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    ratio = (logprobs - before).exp()
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -(ratio * advantages).minimum(clipped * advantages)


def _cispo(logprobs: Tensor, before: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    ratio = (logprobs - before).exp().detach()
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    return -clipped * logprobs * advantages


def _dro(logprobs: Tensor, before: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    return -logprobs * advantages + 0.5 * settings["beta"] * (logprobs - before).square()


LOSSES: dict[str, ServiceLoss] = {
    "cross_entropy": ServiceLoss(_cross_entropy, "weights", compares=False, settings={}),
    "importance_sampling": ServiceLoss(_importance, settings={}),
    "ppo": ServiceLoss(_ppo, settings={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": ServiceLoss(_cispo, settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": ServiceLoss(_dro, settings={"beta": 0.05}),
}


def find(name: str, given: Settings) -> tuple[ServiceLoss, Settings]:
    """The loss and all of its settings. Raises ServiceError for one that is not there, naming what
    is."""
    if name not in LOSSES:
        raise ServiceError(f"there is no loss_fn={name} here; there are {', '.join(LOSSES)}")
    loss = LOSSES[name]
    if unknown := sorted(set(given) - set(loss.settings)):
        takes = ", ".join(loss.settings) or "no settings"
        raise ServiceError(f"loss_fn={name} has no {', '.join(unknown)}; it takes {takes}")
    return loss, {**loss.settings, **given}
