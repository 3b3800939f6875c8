"""What an advantage is: rewards of a step's samples to one number a token."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from lora_moe_rl.algorithms.base import apart
from lora_moe_rl.algorithms.parts import gae
from lora_moe_rl.algorithms.parts.part import Part
from lora_moe_rl.config.section import Section
from lora_moe_rl.data.samples import Sample


@dataclass(frozen=True)
class Rewarded:
    """The samples of a step. rewards: float64 [n], NaN for none. groups: int [n], the number of
    each sample's group. masks: bool [R] a sample, True for tokens that the policy wrote. values:
    float32 [R] a sample, a critic's before the update; None where there is no critic. penalties:
    float64 [R] a sample, what the reward loses at each token; None for nothing. by_function:
    float64 [n] of each of several reward functions, NaN for none; weights: of each of them.
    earlier: float64 [R] a sample, what of its reward was earned before its end; None: nothing.
    turns: int [R] a sample, the number of the policy's turn that its token is of, from 0.
    turn_keys: of each turn of a sample what `Advantage.turn_keys` says; None where it has none.
    teacher, logprobs: float32 [R] a sample, a teacher's logprobs and those it was sampled with;
    None where there is no teacher. baselines: float64 [n], of each sample's prompt the reward of a
    greedy sample, NaN for none; None where none is wanted. written: int [n], tokens that the policy
    wrote in all that a sample stands for, a conversation of several; None: those of its mask."""

    rewards: np.ndarray
    groups: np.ndarray
    masks: Sequence[np.ndarray]
    values: Sequence[np.ndarray] | None = None
    penalties: Sequence[np.ndarray] | None = None
    by_function: Sequence[np.ndarray] = ()
    weights: Sequence[float] = ()
    teacher: Sequence[np.ndarray] | None = None
    logprobs: Sequence[np.ndarray] | None = None
    earlier: Sequence[np.ndarray] | None = None
    turns: Sequence[np.ndarray] | None = None
    turn_keys: Sequence[Sequence[Hashable]] | None = None
    baselines: np.ndarray | None = None
    written: np.ndarray | None = None

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n], tokens that the policy wrote of each sample, or of what it stands for."""
        if self.written is not None:
            return self.written.astype(np.int64)
        return np.array([mask.sum() for mask in self.masks], dtype=np.int64)

    def of_tokens(self) -> list[np.ndarray]:
        """float64 [R] of each sample: minus the penalty of each token that the policy wrote, plus
        the sample's reward at the last of them, but for what was earned before. 0 for other tokens,
        and for all of a sample without a reward."""
        found = [np.zeros(len(mask)) for mask in self.masks]
        for i, (each, mask, reward) in enumerate(zip(found, self.masks, self.rewards, strict=True)):
            if np.isnan(reward):
                continue
            if self.penalties is not None:
                each[mask] -= self.penalties[i][mask]
            if self.earlier is not None:
                each += self.earlier[i]
                reward = reward - self.earlier[i].sum()
            each[np.flatnonzero(mask)[-1:]] += reward
        return found

    def of_samples(self) -> np.ndarray:
        """float64 [n]: each sample's reward less the penalties of its tokens; NaN for none."""
        if self.penalties is None:
            return self.rewards
        lost = [p[mask].sum() for p, mask in zip(self.penalties, self.masks, strict=True)]
        return self.rewards - np.array(lost)


class Advantage(Part):
    """Base of all advantages. Most compare the samples of a group and write `of_group`; those that
    need the whole step write `of_step`.

    `compares_group`: whether one sample a prompt is too few. `takes_negative`: whether a reward may
    be below 0. `needs_values`: whether it wants a critic's value of each token.
    `separates_rewards`: whether it looks at each of several reward functions by itself.
    `compares_turns`: whether it compares turns of a group's samples: those of equal `turn_keys`.
    `needs_teacher`: whether it wants a teacher's logprob of each token; its settings are then
    `AnyTeacher` too, and have a `reward_weight`.
    `greedy_baseline`: whether it wants the reward of a greedy sample of each prompt.
    """

    compares_group: ClassVar[bool] = True
    takes_negative: ClassVar[bool] = True
    needs_values: ClassVar[bool] = False
    separates_rewards: ClassVar[bool] = False
    compares_turns: ClassVar[bool] = False
    needs_teacher: ClassVar[bool] = False
    greedy_baseline: ClassVar[bool] = False

    @classmethod
    def by_token(cls, settings: Any) -> bool:
        """Whether tokens of one sample may have different advantages, with these settings of an
        algorithm."""
        return cls.needs_values or cls.needs_teacher

    @classmethod
    def turn_keys(cls, sample: Sample) -> Sequence[Hashable]:
        """Of each of the policy's turns by what it is told which others of the group it is compared
        with; of one that `compares_turns`."""
        raise NotImplementedError

    def of_group(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Advantages [k] of the k samples of one group that have a reward, which are at least two
        and further apart than algorithm.equal_within. rewards: float64 [k]. lengths: int [k],
        tokens that the policy wrote."""
        raise NotImplementedError

    def of_penalties(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The same of samples whose rewards were equal before penalties were taken from them."""
        return self.of_group(rewards, lengths)

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        """float64 [R] of each sample. What it says of samples without a reward does not count."""
        each = self.of_samples(step)
        return [np.full(len(mask), one) for mask, one in zip(step.masks, each, strict=True)]

    def of_samples(self, step: Rewarded) -> np.ndarray:
        """float64 [n]: 0 for a sample without a reward, which says nothing about the others, and
        for all of a group that has nothing to compare."""
        return self.compared(step.of_samples(), step)

    def compared(self, every: np.ndarray, step: Rewarded) -> np.ndarray:
        """The same for `every`, float64 [n], in the place of the samples' rewards."""
        found, given, lengths = np.zeros(len(every)), ~np.isnan(every), step.lengths
        for group in np.unique(step.groups):
            mine = np.flatnonzero(given & (step.groups == group))
            if not apart(every[mine], self.settings.equal_within):
                continue
            told_apart = step.penalties is None or apart(
                step.rewards[mine], self.settings.equal_within
            )
            of = self.of_group if told_apart else self.of_penalties
            found[mine] = of(every[mine], lengths[mine])
        return found


class GAESettings(Section):
    """What all have that look ahead from token to token."""

    gamma: float = Field(1.0, gt=0, le=1, description="Discount of what comes a token later.")


class ValueAdvantage(Advantage):
    """Base of those that a critic's values make: generalized advantages, whitened over the step's
    tokens, and the returns that the critic learns, which have a lambda of their own and are not
    whitened."""

    Settings: ClassVar[type[Section]] = GAESettings
    compares_group = False
    needs_values = True

    def policy_lambdas(self, lengths: np.ndarray) -> np.ndarray:
        """float64 [n], the lambda of each sample's advantages. lengths: int [n], tokens that the
        policy wrote."""
        raise NotImplementedError

    def value_lambda(self) -> float:
        """The lambda of the returns."""
        raise NotImplementedError

    def of_step(self, step: Rewarded) -> list[np.ndarray]:
        """Raises ValueError without values."""
        return whitened(self._ahead(step, self.policy_lambdas(step.lengths)), step)

    def returns(self, step: Rewarded) -> list[np.ndarray]:
        """float64 [R] of each sample, what the critic's values should have been. What it says of
        samples without a reward, and outside the masks, does not count. Raises ValueError without
        values."""
        ahead = self._ahead(step, np.full(len(step.masks), self.value_lambda()))
        assert step.values is not None
        return [a + value for a, value in zip(ahead, step.values, strict=True)]

    def _ahead(self, step: Rewarded, lambdas: np.ndarray) -> list[np.ndarray]:
        if step.values is None:
            name = self.settings.advantage
            raise ValueError(f"algorithm.advantage={name} needs a critic's values; there are none")
        return gae.estimate(step.of_tokens(), step.values, step.masks, self.settings.gamma, lambdas)


def whitened(values: Sequence[np.ndarray], step: Rewarded) -> list[np.ndarray]:
    """`values` [R] of each sample, with mean 0 and deviation 1 over all tokens that a policy wrote
    in samples with a reward: the deviation is the sample's (n - 1), as in verl. A sample that
    stands for several counts with the tokens of all, which have its one value."""
    given = zip(values, step.masks, step.lengths.tolist(), step.rewards, strict=True)
    every = np.concatenate([np.resize(v[m], n) for v, m, n, r in given if not np.isnan(r)] or [[]])
    if len(every) < 2:
        return [np.zeros(len(value)) for value in values]
    scale = 1.0 / np.sqrt(every.var(ddof=1) + 1e-8)
    return [(value - every.mean()) * scale for value in values]
