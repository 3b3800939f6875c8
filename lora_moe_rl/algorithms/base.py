"""What an algorithm is: its settings, what it wants to know, its signal and its loss, in one file.

    group of samples ──signal──> advantages and weights of every token        host, numpy
    packed tokens    ──loss────> a sum over tokens, and sums for the metrics   device, torch

The trainer, the meter and the planner know no algorithm: they read what it declares. Importing this
file imports no torch, and neither need the file of an algorithm: tensors bring their methods along.

Shape letters: n samples of a group, R tokens after a prompt, T packed tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from lora_moe_rl.config import AlgorithmConfig
from lora_moe_rl.data.samples import Group

if TYPE_CHECKING:
    from torch import Tensor

Pass = Literal["old", "reference"]
# How a metric of the loss is put together over micro-batches and ranks. A token_mean is given as a
# sum over the tokens in the loss.
Reduce = Literal["token_mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Signal:
    """What a group says to its tokens: one float32 array [R] a sample for each.

    A weight of 0 leaves a token out of the loss and out of the count that the loss is divided by.
    """

    advantages: list[np.ndarray]
    weights: list[np.ndarray]

    @classmethod
    def of_samples(cls, group: Group, advantages: np.ndarray) -> Signal:
        """One advantage a sample, float32 [n], for all tokens that its policy wrote."""
        return cls(
            [
                np.full(len(sample.mask), advantage, np.float32)
                for sample, advantage in zip(group.samples, advantages, strict=True)
            ],
            [sample.mask.astype(np.float32) for sample in group.samples],
        )


@dataclass(frozen=True)
class Tokens:
    """The tokens of one packed micro-batch, all [T].

    logprobs: of the policy that is trained, with gradient. old: of the trainer before the update.
    rollout: of the engine, as sampled. reference: of the base (None unless that pass is wanted).
    weights: above 0 for tokens in the loss. samples: int64, sample numbers, -1 for padding.
    versions: int32, the adapter version that sampled the token, -1 for none.

    Where the weight is 0 everything but `logprobs` may hold anything, NaN too.
    """

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor | None
    advantages: Tensor
    weights: Tensor
    samples: Tensor
    versions: Tensor

    @property
    def mask(self) -> Tensor:
        """bool, True for tokens in the loss."""
        return self.weights > 0


@dataclass(frozen=True)
class Loss:
    """`total`: the summed loss, with gradient; the trainer divides it by the number of tokens in
    the loss of the whole step. `metrics`: those that the algorithm declares, without gradient."""

    total: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Algorithm:
    """Base of all algorithms. `metrics` become `loss/<name>` in the records."""

    Settings: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    metrics: ClassVar[Mapping[str, Reduce]] = {}

    def __init__(self, settings: AlgorithmConfig):
        self.settings = settings

    @property
    def passes(self) -> frozenset[Pass]:
        """Forwards that the loss wants to be made before the update. `old` is made anyway when one
        rollout is used for several updates; without it `old` is `logprobs`, detached."""
        return frozenset()

    def signal(self, group: Group) -> Signal:
        """Advantages and weights of a group. Its samples without a reward are left out afterwards,
        whatever is said of them here. Pure."""
        raise NotImplementedError

    def loss(self, tokens: Tokens) -> Loss:
        """The loss of one micro-batch. Pure."""
        raise NotImplementedError


def signal_of(algorithm: Algorithm, group: Group) -> Signal:
    """What `algorithm` says of a group, without samples that have no reward (a failure is not a
    reward) and, if `algorithm.mask_truncated` is set, without those that were cut off."""
    signal = algorithm.signal(group)
    _check_shapes(algorithm, group, signal)
    left_out = np.isnan(group.rewards)
    if algorithm.settings.mask_truncated:
        left_out = left_out | np.array([sample.truncated for sample in group.samples])
    weights = [
        np.zeros_like(weight) if out else weight
        for weight, out in zip(signal.weights, left_out, strict=True)
    ]
    return Signal(signal.advantages, weights)


def _check_shapes(algorithm: Algorithm, group: Group, signal: Signal) -> None:
    wanted = [sample.mask.shape for sample in group.samples]
    for name in ("advantages", "weights"):
        arrays: Sequence[np.ndarray] = getattr(signal, name)
        if (found := [array.shape for array in arrays]) != wanted:
            raise ValueError(
                f"{type(algorithm).__name__}.signal returned {name} of shapes {found} for samples "
                f"of {wanted} tokens"
            )
