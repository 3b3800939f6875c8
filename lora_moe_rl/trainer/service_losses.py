"""The losses that a client of the service names, of single tokens; the loss is their sum.

Formulas and defaults as Tinker's documentation has them (tinker-docs.thinkingmachines.ai, losses).
Importing this file imports no torch: tensors bring their methods along.

Shape letter: T packed tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lora_moe_rl.errors import ServiceError

if TYPE_CHECKING:
    from torch import Tensor

Settings = Mapping[str, float]
LOGPROBS, MARKS = "logprobs", "sequence_ratio_mask"  # inputs of a datum, besides the coefficient
CLIP = ("clip_low_threshold", "clip_high_threshold")


class Tokens(NamedTuple):
    """logprobs, with gradient; `before`, those that sampled; the coefficient: float32 `[T]`. Of a
    loss that marks tokens: which, bool `[T]`, and of each the place of its datum, int64 `[T]`."""

    logprobs: Tensor
    before: Tensor
    coefficient: Tensor
    marks: Tensor | None = None
    places: Tensor | None = None


# The loss of each token.
Values = Callable[[Tokens, Settings], "Tensor"]


@dataclass(frozen=True)
class ServiceLoss:
    """`coefficient`: the input of a datum that each token's term is multiplied by. `compares`:
    whether it reads `logprobs`, those of the tokens when they were sampled; `marks`: whether it
    reads `sequence_ratio_mask`. `settings`: those that there are, with their defaults; None: it has
    to be given. `wide`: whether there may be several targets at a place."""

    values: Values
    settings: Mapping[str, float | None]
    coefficient: str = "advantages"
    compares: bool = True
    marks: bool = False
    wide: bool = False

    @property
    def inputs(self) -> set[str]:
        read = {LOGPROBS: self.compares, MARKS: self.marks}
        return {self.coefficient, *(name for name, is_read in read.items() if is_read)}


def _cross_entropy(tokens: Tokens, settings: Settings) -> Tensor:
    return -tokens.logprobs * tokens.coefficient


def _importance(tokens: Tokens, settings: Settings) -> Tensor:
    return -(tokens.logprobs - tokens.before).exp() * tokens.coefficient


def _ppo(tokens: Tokens, settings: Settings) -> Tensor:
    return _clipped((tokens.logprobs - tokens.before).exp(), tokens.coefficient, settings)


def _gspo(tokens: Tokens, settings: Settings) -> Tensor:
    """The loss of ppo with one ratio for all tokens of a datum: the geometric mean of those that
    are marked (GSPO-token, arXiv:2507.18071)."""
    logprobs, before, advantages, marks, places = tokens
    assert marks is not None and places is not None
    now = logprobs.detach()
    sums = now.new_zeros(2, int(places.max()) + 1)
    sums[0].index_add_(0, places, (now - before).where(marks, 0))
    sums[1].index_add_(0, places, marks.to(now.dtype))
    of_datum = (sums[0] / sums[1].clamp(min=1))[places]
    return _clipped((of_datum + logprobs - now).exp(), advantages, settings)


def _clipped(ratio: Tensor, advantages: Tensor, settings: Settings) -> Tensor:
    clipped = ratio.clamp(*(settings[name] for name in CLIP))
    return -(ratio * advantages).minimum(clipped * advantages)


def _cispo(tokens: Tokens, settings: Settings) -> Tensor:
    ratio = (tokens.logprobs - tokens.before).exp().detach()
    clipped = ratio.clamp(*(settings[name] for name in CLIP))
    return -clipped * tokens.logprobs * tokens.coefficient


def _dro(tokens: Tokens, settings: Settings) -> Tensor:
    squared = (tokens.logprobs - tokens.before).square()
    return -tokens.logprobs * tokens.coefficient + 0.5 * settings["beta"] * squared


LOSSES = {
    "cross_entropy": ServiceLoss(_cross_entropy, {}, "weights", compares=False, wide=True),
    "importance_sampling": ServiceLoss(_importance, {}),
    "ppo": ServiceLoss(_ppo, dict(zip(CLIP, (0.8, 1.2), strict=True))),
    "cispo": ServiceLoss(_cispo, dict(zip(CLIP, (0.0, 4.0), strict=True))),
    "dro": ServiceLoss(_dro, {"beta": 0.05}),
    "gspo": ServiceLoss(_gspo, dict.fromkeys(CLIP), marks=True),
}


def find(name: str, given: Settings) -> tuple[ServiceLoss, Settings]:
    """The loss and all of its settings. Raises ServiceError for one that is not there, naming what
    is, and for settings that are not there, missing, or at odds."""
    if name not in LOSSES:
        raise ServiceError(f"there is no loss_fn={name} here; there are {', '.join(LOSSES)}")
    loss = LOSSES[name]
    if unknown := sorted(set(given) - set(loss.settings)):
        takes = ", ".join(loss.settings) or "no settings"
        raise ServiceError(f"loss_fn={name} has no {', '.join(unknown)}; it takes {takes}")
    every = {**loss.settings, **given}
    if wanting := [key for key, value in every.items() if value is None]:
        raise ServiceError(f"loss_fn={name} wants loss_fn_config to have {' and '.join(wanting)}")
    low, high = (every.get(name) for name in CLIP)
    if low is not None and high is not None and low > high:
        raise ServiceError(
            f"loss_fn={name}: {CLIP[0]}={low} is above {CLIP[1]}={high}, and no ratio lies between"
        )
    return loss, {key: value for key, value in every.items() if value is not None}
