"""Tokens that a loss treats otherwise than the others of their optimizer step, by a statistic over
all of them: a covariance, a quantile of entropies. Pure, numpy, on the host.

All that is compared is in one optimizer step, whatever micro-batches and ranks its tokens are on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lora_moe_rl.config.plugins import PARTS

if TYPE_CHECKING:
    from lora_moe_rl.algorithms.parts.settings import PolicyGradientConfig

# What is no further apart is equal but for float32's rounding, as the entropies of the first tokens
# of a group, which follow the same prompt: a layout must not part them.
ROUNDING = 1e-5


@dataclass(frozen=True)
class StepTokens:
    """The N tokens in the loss of one optimizer step, in the order of its samples, as the forward
    before the update found them; those of a sample that stands in the loss several times are there
    as often. All float64 [N].

    logprobs, old, rollout, advantages: as in `Tokens`, with `logprobs` the old ones. lots: a random
    number from 0 to 1 of each token, by seed, step and place (`lots_of`): to choose among equals.
    entropy: in nats, of what each is sampled from; None unless `Algorithm.selects_by_entropy`.
    """

    logprobs: np.ndarray
    old: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    lots: np.ndarray
    entropy: np.ndarray | None = None


@dataclass(frozen=True)
class Selection:
    """`tokens`: bool [N], those that are selected. `metrics`: numbers of the optimizer step,
    recorded as `loss/<name>`, the mean over those of a step."""

    tokens: np.ndarray
    metrics: dict[str, float] = field(default_factory=dict)


def lots_of(seed: int, step: int, sample: int, copies: int, size: int) -> np.ndarray:
    """float64 [copies, size]: of each token of a sample of the step, each time that it stands in
    the loss. What else the step has changes nothing."""
    return np.random.default_rng([seed, step, 2, sample]).random((copies, size))


def covariances(tokens: StepTokens) -> np.ndarray:
    """float64 [N]: what each token adds to the covariance of advantage and logprob."""
    advantages, logprobs = tokens.advantages, tokens.logprobs
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def share_of(number: int, share: float) -> int:
    """How many tokens a share of them is: at least one (verl's rounding)."""
    return max(int(number * share), 1)


def largest(values: np.ndarray, number: int, lots: np.ndarray) -> np.ndarray:
    """bool [N]: the `number` largest; of those that equal the smallest of them the ones of the
    smallest lots."""
    smallest = np.partition(values, -number)[-number]
    above = values > smallest + ROUNDING
    equal = np.abs(values - smallest) <= ROUNDING
    return above | drawn(equal, number - int(above.sum()), lots)


def drawn(candidates: np.ndarray, number: int, lots: np.ndarray) -> np.ndarray:
    """bool [N]: at most `number` of the candidates, bool [N], each as likely as another: those of
    the smallest lots."""
    chosen = np.zeros(len(candidates), bool)
    chosen[np.argsort(np.where(candidates, lots, 2), kind="stable")[:number]] = True
    return chosen & candidates


def of_high_entropy(tokens: StepTokens, quantile: float) -> Selection:
    """The tokens whose entropy is that of the upper `quantile` or more, or equals it. The threshold
    lies between two entropies where none is at the place (TRL's rule, torch.quantile)."""
    if tokens.entropy is None:
        raise ValueError("algorithm.top_entropy_quantile wants the tokens' entropy; it is missing")
    threshold = float(np.quantile(tokens.entropy, 1 - quantile))
    chosen = tokens.entropy >= threshold - ROUNDING
    return Selection(chosen, {"entropy_threshold": threshold})


def check_selection(settings: PolicyGradientConfig) -> None:
    """Raises ValueError for what cannot select tokens, or does so for nothing."""
    loss, quantile = PARTS["loss"].find(settings.loss), settings.top_entropy_quantile
    if quantile < 1 and loss.selects:
        raise ValueError(
            f"algorithm.loss={settings.loss} selects tokens of each optimizer step, and "
            f"algorithm.top_entropy_quantile={quantile:g} would select others; set one of them"
        )
    if quantile < 1 and loss.level == "sequence":
        raise ValueError(
            f"algorithm.loss={settings.loss} has one ratio a sample and "
            f"algorithm.top_entropy_quantile={quantile:g} trains single tokens of it; take a loss "
            "with a ratio a token (ppo_clip, cispo), or leave the quantile at 1"
        )
    moves = not settings.on_policy or settings.anchor == "rollout"
    if loss.needs_moved and not moves:
        raise ValueError(
            f"algorithm.loss={settings.loss} penalises how far tokens have moved since the policy "
            f"before the update, and algorithm.epochs={settings.epochs} with mini_batches="
            f"{settings.mini_batches} is one update, in which none has; set one of them higher, or "
            "algorithm.anchor=rollout"
        )
