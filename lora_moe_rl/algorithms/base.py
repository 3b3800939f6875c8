"""What an algorithm is: its settings, what it wants to know, its signal and its loss, in one file.

    groups of a step ──signals──> advantages and weights of every token    host, numpy
    forwards         ──revised──> other advantages, if it wants      host, numpy, once
    packed tokens    ──keep─────> which of them stay in the loss           device, torch, once
    those that stay  ──select───> which of them are treated otherwise     host, numpy, once
    packed tokens    ──loss─────> the loss of every token, and metrics     device, torch

The trainer, the meter and the planner know no algorithm: they read what it declares. Importing this
file imports no torch, and neither need the file of an algorithm: tensors bring their methods along.

Shape letters: n samples of a group, R tokens after a prompt, T packed tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from lora_moe_rl.config import AlgorithmConfig, LearnsFrom
from lora_moe_rl.config.plugins import Plugin
from lora_moe_rl.config.reference import Against, ReferenceSettings
from lora_moe_rl.data.samples import Group

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.parts.critic import CriticSettings
    from lora_moe_rl.algorithms.parts.divergence import Divergence
    from lora_moe_rl.algorithms.parts.kl_control import KLControl
    from lora_moe_rl.algorithms.parts.selection import Selection, StepTokens
    from lora_moe_rl.config.teacher import AnyTeacher

Pass = Literal["old", "reference", "values"]
# How a metric is put together from the tokens in the loss, over micro-batches and ranks.
Reduce = Literal["token_mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Signal:
    """What a group says to its tokens: one float32 array [R] a sample for each.

    A weight of 0 leaves a token out of the loss and out of the count that the loss is divided by.
    rewards: float64 [n], of an algorithm that revises its advantages; None of others. earlier:
    float64 [R] a sample, what of its reward was earned before its end; None: nothing. copies: int
    [n], how many times each sample stands in the loss; None: once.
    """

    advantages: list[np.ndarray]
    weights: list[np.ndarray]
    rewards: np.ndarray | None = None
    copies: np.ndarray | None = None
    earlier: list[np.ndarray] | None = None

    @classmethod
    def of_samples(cls, group: Group, advantages: np.ndarray) -> Signal:
        """One advantage a sample, float32 [n], for all tokens that its policy wrote."""
        return cls.of_tokens(
            group,
            [
                np.full(len(sample.mask), advantage, np.float32)
                for sample, advantage in zip(group.samples, advantages, strict=True)
            ],
        )

    @classmethod
    def of_tokens(cls, group: Group, advantages: Sequence[np.ndarray]) -> Signal:
        """Advantages [R] of each sample; every token that its policy wrote weighs 1."""
        weights = [sample.mask.astype(np.float32) for sample in group.samples]
        return cls([np.asarray(one, np.float32) for one in advantages], weights)


@dataclass(frozen=True)
class Known:
    """All samples of a step, when the forwards before the update are done. rewards: float64 [n],
    NaN for none. groups: int [n], the number of each sample's group. Of each sample [R]: masks,
    bool, True for tokens that the policy wrote; old and reference, float64 logprobs, as in
    `Tokens`; values, float64, what the critic expects before each token. None for a forward that is
    not among `passes`. kl_coef: as in `Tokens`. earlier: float64 [R], what of each sample's reward
    was earned before its end; None: nothing."""

    rewards: np.ndarray
    groups: np.ndarray
    masks: Sequence[np.ndarray]
    old: Sequence[np.ndarray] | None = None
    reference: Sequence[np.ndarray] | None = None
    values: Sequence[np.ndarray] | None = None
    kl_coef: float | None = None
    earlier: Sequence[np.ndarray] | None = None


@dataclass(frozen=True)
class Tokens:
    """The tokens of one packed micro-batch, all [T].

    mask: bool, True for tokens in the loss; outside it all that follows is 0. logprobs: of the
    policy that is trained, with gradient. old: of the trainer before the update. rollout: of the
    engine, as sampled. reference: of the base, or of the start (None unless that pass is wanted).
    versions: int32, the adapter version that sampled the token.

    samples: int64, which of the `num_samples` samples of the micro-batch the token is of; the last
    one stands for the padding. step_mean: what `Algorithm.averaged` asks for, None without.
    rewards: float32, that of the token's sample, with an algorithm that revises its advantages;
    None with others. entropy: float32, in nats, of the distribution that the token is sampled from,
    with gradient; None unless the algorithm `trains_entropy`, and in what is asked before the
    update. kl_coef: the weight of the KL in this step, of an algorithm with a `kl_control`.

    selected: float32, 1 for tokens that `select` has chosen and 0 for others, or the share of its
    copies, of one that stands in the loss several times; None unless the algorithm `selects`.
    divergence: float32, in nats, of the policy from its teacher, with gradient; None unless the
    algorithm has a `divergence`, and in what is asked before the update.
    """

    mask: Tensor
    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    reference: Tensor | None
    advantages: Tensor
    versions: Tensor
    samples: Tensor
    num_samples: int
    step_mean: float | None = None
    rewards: Tensor | None = None
    entropy: Tensor | None = None
    kl_coef: float | None = None
    selected: Tensor | None = None
    divergence: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """`values` [T]: the loss of every token, with gradient; the trainer weighs, sums and divides as
    algorithm.aggregation says. `metrics` [T]: those that the algorithm declares, without gradient.
    What they are outside the mask does not count, but must be finite."""

    values: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Algorithm(Plugin):
    """Base of all algorithms. `metrics` become `loss/<name>` in the records. `learns_from`: samples
    of engines (rollouts), the wanted answer of each row (answers), or two answers of each row, the
    first the better one (pairs). With the last two no engine starts; a group's samples are the
    row's answers, with rewards that fall from the first to the last.

    `max_response_tokens`: the longest response that a sample may have."""

    Settings: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    metrics: Mapping[str, Reduce] = {}
    learns_from: ClassVar[LearnsFrom] = "rollouts"

    def __init__(self, settings: AlgorithmConfig, max_response_tokens: int):
        self.settings, self.max_response_tokens = settings, max_response_tokens

    @classmethod
    def corrects(cls, settings: Any) -> bool:
        """Whether the loss allows for tokens that an older version has sampled."""
        return False

    @property
    def passes(self) -> frozenset[Pass]:
        """Forwards that the loss wants to be made before the update. `old` is made anyway when one
        rollout is used for several updates; without it `old` is `logprobs`, detached."""
        return frozenset()

    @property
    def reference(self) -> Against:
        """Which policy the forward `reference` is of, if it is among `passes`."""
        settings = self.settings
        return settings.reference if isinstance(settings, ReferenceSettings) else "base"

    @property
    def from_start(self) -> bool:
        """Whether the policy is measured against the adapter that the run starts from."""
        return self.reference == "start" and "reference" in self.passes

    @property
    def trains_entropy(self) -> bool:
        """Whether the loss goes by `tokens.entropy`: the head then forms its gradient too, and
        keeps a hidden state more of each token until the backward."""
        return False

    @property
    def divergence(self) -> Divergence | None:
        """How the policy is compared with its teacher's likeliest tokens (`Group.likeliest`), where
        the loss goes by `tokens.divergence`, which the head then forms; None without."""
        return None

    @property
    def critic(self) -> CriticSettings | None:
        """Settings of the critic that is trained beside the policy; None without one."""
        return None

    @property
    def teacher(self) -> AnyTeacher | None:
        """Settings of the teacher that scores the samples of each group (`Group.teacher`), before
        `signals` is asked; None without one."""
        return None

    @property
    def greedy_baseline(self) -> bool:
        """Whether it wants the reward of one more sample of each prompt, of the likeliest tokens,
        that is not trained on (`Group.baseline`)."""
        return False

    @property
    def needs_reward(self) -> bool:
        """Whether there is nothing to learn without a reward function. False only with a teacher,
        which then gives the samples their rewards."""
        return True

    @property
    def kl_control(self) -> KLControl | None:
        """What lets the weight of the KL follow `loss/kl` from step to step, at its start; None
        where it stays."""
        return None

    def returns(self, step: Known) -> list[np.ndarray]:
        """What the critic's values should have been, [R] of each sample. Asked as `revised` is,
        with the values of before the update. Pure."""
        raise NotImplementedError

    def signals(self, groups: Sequence[Group]) -> list[Signal]:
        """The signal of each group of a step. Pure."""
        return [self.signal(group) for group in groups]

    def signal(self, group: Group) -> Signal:
        """Advantages and weights of a group. Its samples without a reward are left out afterwards,
        whatever is said of them here. Pure."""
        raise NotImplementedError

    def rewards(self, group: Group) -> np.ndarray:
        """float64 [n], NaN for none: the rewards that count, by which `algorithm.reweight` draws.
        Pure."""
        return np.asarray(group.rewards, np.float64)

    def has_signal(self, group: Group) -> bool:
        """Whether the group tells its samples apart: two have rewards further apart than
        `equal_within`."""
        return apart(group.rewards, self.settings.equal_within)

    @property
    def revises(self) -> bool:
        """Whether `revised` is to be asked: `passes` has the forwards that it goes by."""
        return type(self).revised is not Algorithm.revised

    @property
    def takes_forks(self) -> bool:
        """Whether a conversation that became several samples (a fork) can be trained on: its tokens
        have one advantage, which all its samples are given. One whose `signals` give tokens of a
        sample advantages of their own says False."""
        return not self.revises and self.teacher is None

    def revised(self, step: Known) -> list[np.ndarray]:
        """Advantages [R] of each sample, which take the place of those of the signals. Asked once a
        step, on every rank with the same arguments, before `averaged` and `keep`. Pure."""
        raise NotImplementedError

    def revised_metrics(self, step: Known) -> dict[str, float]:
        """What is recorded of the whole step as `revised` knows it, under these names. Asked with
        it. Pure."""
        return {}

    @property
    def rejects(self) -> bool:
        """Whether `keep` is to be asked, for which the pass `old` is made."""
        return type(self).keep is not Algorithm.keep

    def keep(self, tokens: Tokens) -> Tensor:
        """bool [T]: tokens that stay in the loss. Asked once for the samples of a step, before its
        first update, with `logprobs` the old ones. Pure."""
        raise NotImplementedError

    @property
    def selects(self) -> bool:
        """Whether `select` is to be asked, for which the pass `old` is made."""
        return type(self).select is not Algorithm.select

    @property
    def selects_by_entropy(self) -> bool:
        """Whether `select` is told entropies, which the pass `old` then forms."""
        return False

    def select(self, tokens: StepTokens) -> Selection:
        """Which tokens of an optimizer step are `tokens.selected` in its losses. Asked for each
        optimizer step that has tokens, before the first update, of what `keep` has left, on every
        rank with the same arguments; what it says stands for all epochs. Pure."""
        raise NotImplementedError

    @property
    def averages(self) -> bool:
        """Whether `averaged` is to be asked, for which the pass `old` is made."""
        return type(self).averaged is not Algorithm.averaged

    @property
    def averages_kept(self) -> bool:
        """Whether `averaged` is of the tokens that `keep` has left, and not of all."""
        return False

    def averaged(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Two streams [T], of which the sum of the first over all tokens of the step, before `keep`
        takes any out or after (`averages_kept`), divided by that of the second is
        `tokens.step_mean` of every loss of the step. Asked as `keep` is. Pure."""
        raise NotImplementedError

    @classmethod
    def judges(cls) -> bool:
        """Whether there is a `held_out`: of an algorithm that learns from rows' own answers."""
        return cls.held_out is not Algorithm.held_out

    def held_out(self, rows: Known) -> dict[str, float]:
        """What is told of held-out rows, as `eval/<set>/<name>`. `rows.old` are logprobs of the
        policy, `rows.reference` those of the forward `reference`, if it is among `passes`. Pure."""
        raise NotImplementedError

    def loss(self, tokens: Tokens) -> Loss:
        """The loss of one micro-batch. Pure."""
        raise NotImplementedError

    def summary(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """What follows from the step's metrics, which are named as they are recorded. Pure."""
        return {}


def apart(rewards: np.ndarray, equal_within: float) -> bool:
    """Whether two of the rewards [n], NaN for none, are further apart than `equal_within`."""
    given = rewards[~np.isnan(rewards)].astype(np.float64)
    return given.size > 0 and float(np.ptp(given)) > equal_within
