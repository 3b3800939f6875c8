"""Direct preference optimisation (arXiv:2305.18290): of a prompt's two answers the chosen one is
made likelier against the reference than the rejected one: against the base, or the start.

    margin = beta * ((log pi - log ref)(chosen) - (log pi - log ref)(rejected)), sums over tokens

    pair_loss       of a pair, the mean over pairs; s: label_smoothing
    sigmoid         -(1 - s) log sigmoid(margin) - s log sigmoid(-margin)
    robust          (-(1 - s) log sigmoid(margin) + s log sigmoid(-margin)) / (1 - 2 s)
    hinge           max(0, 1 - margin)
    sigmoid_norm    -log sigmoid(margin), and the margin is of means over tokens
    ipo             ((margin - 1/2) / beta)^2, of means over tokens too

They are TRL's loss_types of these names, whose sigmoid has no s (this is cDPO's). The margin takes
tokens of two samples, which may stand in two micro-batches and on two ranks. So what each token's
logprob is worth to the loss is made of the forwards before the update, and the trainer's loss is a
sum of products that has the gradient of the above at that point, which is where a step's one update
is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from lora_moe_rl.algorithms.base import Algorithm, Known, Loss, Pass, Reduce, Signal, Tokens
from lora_moe_rl.config import Aggregation, AlgorithmConfig, LearnsFrom
from lora_moe_rl.config.reference import ReferenceSettings
from lora_moe_rl.data.samples import Group

REWARDS = ("chosen", "rejected", "margins", "accuracies")
SUMS: Aggregation = "seq-mean-token-sum"
PairLoss = Literal["sigmoid", "robust", "hinge", "sigmoid_norm", "ipo"]
OF_MEANS = ("sigmoid_norm", "ipo")
SMOOTHED = ("sigmoid", "robust")


class DPOConfig(AlgorithmConfig, ReferenceSettings):
    group_size: int = Field(2, ge=2, le=2, description="Answers of each prompt.")
    aggregation: Aggregation = Field(SUMS, description="What weighs the same: pairs.")
    pair_loss: PairLoss = Field(
        "sigmoid",
        description="What is made small for a pair: DPO's (sigmoid; robust, which takes out what "
        "label_smoothing brings in), a hinge, DPO's of means over tokens, or IPO's.",
    )
    beta: float = Field(
        0.1, gt=0, description="How much a change against the reference counts: TRL's default."
    )
    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs that are taken to be the wrong way round.",
    )

    @model_validator(mode="after")
    def _as_published(self):
        if self.aggregation != SUMS:
            raise ValueError(
                f"algorithm.aggregation={self.aggregation} has no meaning with algorithm=dpo, "
                f"whose loss is of sums over whole answers; leave it at {SUMS}"
            )
        if self.updates_per_step > 1:
            raise ValueError(
                f"algorithm.epochs={self.epochs} and algorithm.mini_batches={self.mini_batches} "
                "make several updates a step, and algorithm=dpo weighs pairs once, before the "
                "first; set both to 1, and algorithm.prompts_per_step to the pairs of an update"
            )
        if self.label_smoothing and self.pair_loss not in SMOOTHED:
            raise ValueError(
                f"algorithm.label_smoothing={self.label_smoothing:g} has no effect with algorithm."
                f"pair_loss={self.pair_loss}: it applies only to {' and '.join(SMOOTHED)}"
            )
        return self


class DPO(Algorithm):
    Settings: ClassVar[type[AlgorithmConfig]] = DPOConfig
    metrics: Mapping[str, Reduce] = {}
    learns_from: ClassVar[LearnsFrom] = "pairs"

    settings: DPOConfig

    @property
    def passes(self) -> frozenset[Pass]:
        return frozenset({"old", "reference"})

    def signal(self, group: Group) -> Signal:
        """The advantages come with `revised`."""
        rewards = np.asarray(group.rewards, np.float64)
        nothing = np.zeros(len(group.samples), np.float32)
        return replace(Signal.of_samples(group, nothing), rewards=rewards)

    def revised(self, step: Known) -> list[np.ndarray]:
        """Minus the derivative of the step's loss by each token's logprob, times the number of
        samples, by which the trainer divides."""
        pairs, lengths = _pairs(step), self._lengths(step)
        _, slopes = self._of_margins(self._margins(step, pairs))
        worths = np.zeros(len(step.masks))
        worths[pairs[:, 0]] = 2 * self.settings.beta * slopes  # two samples a pair
        worths[pairs[:, 1]] = -worths[pairs[:, 0]]
        each = zip(worths / lengths, step.masks, strict=True)
        return [worth * mask for worth, mask in each]

    def _lengths(self, step: Known) -> np.ndarray:
        """float64 [n]: what the log ratio of a sample is divided by."""
        if self.settings.pair_loss not in OF_MEANS:
            return np.ones(len(step.masks))
        return np.array([max(mask.sum(), 1) for mask in step.masks], np.float64)

    def _margins(self, step: Known, pairs: np.ndarray) -> np.ndarray:
        gains = self.settings.beta * _gains(step) / self._lengths(step)
        return gains[pairs[:, 0]] - gains[pairs[:, 1]]

    def _of_margins(self, margins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float64 [pairs] each: the loss, and minus its derivative by the margin."""
        settings = self.settings
        if settings.pair_loss == "hinge":
            return np.maximum(1 - margins, 0.0), (margins < 1).astype(np.float64)
        if settings.pair_loss == "ipo":
            off = (margins - 0.5) / settings.beta
            return off**2, -2 * off / settings.beta
        smoothed = settings.label_smoothing
        right, wrong = np.logaddexp(0, -margins), np.logaddexp(0, margins)
        up, down = (1 - smoothed) * _sigmoid(-margins), smoothed * _sigmoid(margins)
        if settings.pair_loss == "robust":
            clean = 1 - 2 * smoothed
            return ((1 - smoothed) * right - smoothed * wrong) / clean, (up + down) / clean
        return (1 - smoothed) * right + smoothed * wrong, up - down

    def revised_metrics(self, step: Known) -> dict[str, float]:
        """Of the policy before the update, by TRL's names; the mean over pairs."""
        pairs = _pairs(step)
        gains = self.settings.beta * _gains(step)
        chosen, rejected = gains[pairs[:, 0]], gains[pairs[:, 1]]
        margins = chosen - rejected
        losses, _ = self._of_margins(self._margins(step, pairs))
        own = _sums(step, "old")
        return {
            "loss/dpo": float(losses.mean()),
            "rewards/chosen": float(chosen.mean()),
            "rewards/rejected": float(rejected.mean()),
            "rewards/margins": float(margins.mean()),
            "rewards/accuracies": float((margins > 0).mean()),
            "logps/chosen": float(own[pairs[:, 0]].mean()),
            "logps/rejected": float(own[pairs[:, 1]].mean()),
        }

    def held_out(self, rows: Known) -> dict[str, float]:
        """The same of rows that are not trained on."""
        found = self.revised_metrics(rows)
        own = {"loss": found["loss/dpo"]}
        return own | {n: found[f"rewards/{n}"] for n in REWARDS}

    def loss(self, tokens: Tokens) -> Loss:
        return Loss(-tokens.advantages * tokens.logprobs)


def _pairs(step: Known) -> np.ndarray:
    """int [pairs, 2]: of each group the chosen sample, which has the larger reward, and the
    rejected one. Raises ValueError for a group that is no pair."""
    found = []
    for group in np.unique(step.groups):
        members = np.flatnonzero(step.groups == group)
        order = members[np.argsort(-step.rewards[members], kind="stable")]
        if len(order) != 2 or not step.rewards[order[0]] > step.rewards[order[1]]:
            given = step.rewards[members].tolist()
            raise ValueError(
                f"algorithm=dpo takes pairs of a larger and a smaller reward, and group {group} "
                f"has {given}"
            )
        found.append(order)
    return np.array(found)


def _gains(step: Known) -> np.ndarray:
    """float64 [n]: how much likelier each sample is than under the reference, a log ratio."""
    return _sums(step, "old") - _sums(step, "reference")


def _sums(step: Known, name: Pass) -> np.ndarray:
    """float64 [n]: the logprob of each sample. Raises ValueError when the forward is missing."""
    logprobs = getattr(step, name)
    if logprobs is None:
        raise ValueError(f"algorithm=dpo needs the forward {name!r}, and it was not made")
    return np.array(
        [one[mask].sum() for one, mask in zip(logprobs, step.masks, strict=True)], np.float64
    )


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -values))
