"""What a step has of its samples; `packing.py` makes micro-batches of some of them.

Shape letters: n samples, T packed tokens of a micro-batch. A sample of L tokens is fed as its first
L - 1: position i predicts token i + 1, which is also how the route table counts its rows.

A sample with splits is fed in parts, one after the other, each a sequence of its own from its first
token on. Every token after the prompt is one part's own; all parts are of one micro-batch, so that
whoever counts by sample sees one:

    fed        p0  p1  r0 │ p0  p1  r0  r1  r2         L = 6, splits (4,)
    predicts   p1  r0  r1 │ p1  r0  r1  r2  r3
    own             *   * │             *   *          the rest is never in the loss
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lora_moe_rl.data.alike import alike, followers
from lora_moe_rl.data.samples import Group, Sample
from lora_moe_rl.data.streams import Flat, Joined, Stream, some_of

if TYPE_CHECKING:
    from lora_moe_rl.algorithms.base import Signal


class OfAll(NamedTuple):
    """What a share knows of all samples, by methods of the same names."""

    sizes: np.ndarray
    num_weighted: np.ndarray


@dataclass
class TrainBatch:
    """What the trainer needs of one step's samples. Light: routes travel beside it.

    token_ids: int32 `[L_i]` a sample. prompt_lengths: int `[n]`; the streams below begin after the
    prompt and have R_i = L_i - prompt_lengths[i] entries. logprobs: float32, the rollout's.
    versions: int32, the adapter version that sampled each token. advantages: float32. weights:
    float32, what each token weighs in the loss; 0 leaves it out. masks: bool, tokens that the
    policy wrote, or that the data want of it. mini_batch: int `[n]`, the optimizer step that uses
    the sample. groups: int `[n]`, the number of the sample's group. copies: int `[n]`, how many
    times the sample stands in the loss. step: of the run, from 1; 0 for a forward outside steps.
    rewards: float64 `[n]`, NaN for none, for an algorithm that revises its advantages; None for
    others. splits: by the number of a sample that is cut into parts, where (`Sample.splits`).
    alike: int64 `[n]`, the first sample that begins as each does, whose prompt is fed once for all
    of them in a micro-batch (`alike.py`); None: each feeds its own. kl_coef: the weight of the KL
    in this step, where it is not the same in all (`algorithm.kl_target`). earlier: float64 `[R_i]`
    of every sample, what of its reward was earned before its end; None: nothing. conversations:
    int64 `[n]`, the number of the conversation that the sample is of; None: each is one of its own.
    targets: int32 `[R_i]` of each sample, the tokens whose logprobs are wanted, where they are not
    those that follow; None: they are. `wide`: several are at a place, and they are `[R_i, K]`, as
    advantages are. marks: bool `[R_i]`, tokens whose ratios make their sample's, for a loss that
    has one of each. teacher_ids: int32 `[R_i, K]`, and teacher_logprobs: float32 `[R_i, K]`, a
    teacher's likeliest tokens at each place, for an algorithm with a `divergence`.

    A share of it, for the rank that trains some of the samples, has the streams of these alone;
    what is known of every sample is as in the whole. It is pickled with one array a stream.
    """

    token_ids: Stream
    prompt_lengths: np.ndarray
    logprobs: Stream
    versions: Stream
    advantages: Stream
    weights: Stream
    masks: Stream
    mini_batch: np.ndarray
    groups: np.ndarray
    copies: np.ndarray
    step: int = 1
    rewards: np.ndarray | None = None
    splits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    alike: np.ndarray | None = None
    kl_coef: float | None = None
    earlier: list[np.ndarray] | None = None
    conversations: np.ndarray | None = None
    targets: Stream | None = None
    wide: bool = False
    marks: Stream | None = None
    teacher_ids: Stream | None = None
    teacher_logprobs: Stream | None = None
    of_all: OfAll | None = None  # of a share

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Sample],
        advantages: Sequence[np.ndarray],
        weights: Sequence[np.ndarray],
        mini_batch: np.ndarray | None = None,
        groups: np.ndarray | None = None,
        step: int = 1,
    ) -> TrainBatch:
        """By default all samples are of one optimizer step, and of one group; each stands once."""
        none = np.zeros(len(samples), dtype=np.int64)
        prompts, responses, logprobs, versions, masks = [], [], [], [], []
        for sample in samples:  # once: a large step's samples lie far apart in memory
            prompts.append(sample.prompt_ids)
            responses.append(sample.response_ids)
            logprobs.append(sample.logprobs)
            versions.append(sample.versions)
            masks.append(sample.mask)
        return cls(
            Joined(prompts, responses),
            np.array([len(ids) for ids in prompts]),
            logprobs,
            versions,
            list(advantages),
            list(weights),
            masks,
            none if mini_batch is None else mini_batch,
            none if groups is None else groups,
            none + 1,
            step,
            splits={i: sample.splits for i, sample in enumerate(samples) if sample.splits},
        )

    @classmethod
    def from_groups(
        cls,
        groups: Sequence[Group],
        signals: Sequence[Signal],
        mini_batches: int,
        step: int,
        share_prompts: bool = False,
    ) -> TrainBatch:
        """The samples of all groups in turn; `mini_batches` takes equally many groups each."""
        per_mini_batch = len(groups) // mini_batches
        sizes = [len(group.samples) for group in groups]
        rewards = [signal.rewards for signal in signals if signal.rewards is not None]
        batch = cls.from_samples(
            [sample for group in groups for sample in group.samples],
            [advantages for signal in signals for advantages in signal.advantages],
            [weights for signal in signals for weights in signal.weights],
            np.repeat(np.arange(len(groups)) // per_mini_batch, sizes),
            np.repeat(np.arange(len(groups)), sizes),
            step,
        )
        batch.rewards = np.concatenate(rewards) if rewards else None
        batch.earlier = _earlier(signals)
        copies = [signal.copies for signal in signals if signal.copies is not None]
        batch.copies = np.concatenate(copies) if copies else batch.copies
        batch.conversations = _conversations(groups)
        if groups and all(group.likeliest is not None for group in groups):
            likeliest = [one for group in groups for one in group.likeliest or ()]
            batch.teacher_ids = [one.token_ids for one in likeliest]
            batch.teacher_logprobs = [one.logprobs for one in likeliest]
        batch.alike = alike([group.samples for group in groups]) if share_prompts else None
        return batch

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[Sequence[int] | np.ndarray],
        prompt_lengths: Sequence[int] | None = None,
        step: int = 0,
    ) -> TrainBatch:
        """Whole sequences to be scored: every token after the prompt (by default, after the first)
        counts as response, with weight 1, advantage 0 and rollout logprob 0."""
        prompts = np.ones(len(sequences), np.int64) if prompt_lengths is None else prompt_lengths
        sizes = [len(ids) - int(p) for ids, p in zip(sequences, prompts, strict=True)]
        return cls(
            [np.asarray(s, dtype=np.int32) for s in sequences],
            np.asarray(prompts, dtype=np.int64),
            [np.zeros(n, dtype=np.float32) for n in sizes],
            [np.zeros(n, dtype=np.int32) for n in sizes],
            [np.zeros(n, dtype=np.float32) for n in sizes],
            [np.ones(n, dtype=np.float32) for n in sizes],
            [np.ones(n, dtype=bool) for n in sizes],
            np.zeros(len(sequences), dtype=np.int64),
            np.zeros(len(sequences), dtype=np.int64),
            np.ones(len(sequences), dtype=np.int64),
            step,
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {name: Flat.of(getattr(self, name)) for name in self._streams()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self.__dict__ |= {name: state[name].stream() for name in self._streams()}

    def _streams(self) -> list[str]:
        """The names of those that there are."""
        return [*STREAMS, *(name for name in OPTIONAL if getattr(self, name) is not None)]

    def __len__(self) -> int:
        """Samples, those of other ranks too."""
        return len(self.prompt_lengths)

    def share(self, samples: Iterable[int], of_all: OfAll, masks: bool = False) -> TrainBatch:
        """What a rank needs that trains these samples; `masks`: and of all samples their masks."""
        chosen = sorted(samples)
        names = [name for name in self._streams() if name != "masks" or not masks]
        streams = {name: some_of(getattr(self, name), chosen) for name in names}
        return replace(self, **streams, of_all=of_all)

    def known(self) -> OfAll:
        """What every share is told."""
        return OfAll(self.sizes(), self.num_weighted())

    def of_mini_batches(self, number: int) -> list[np.ndarray]:
        """The samples of each optimizer step, int64."""
        return [np.flatnonzero(self.mini_batch == step) for step in range(number)]

    def sizes(self) -> np.ndarray:
        """int64 `[n]`: tokens of each sample."""
        if self.of_all:
            return self.of_all.sizes
        return self.prompt_lengths + np.array([len(one) for one in self.logprobs], np.int64)

    def response_sizes(self) -> np.ndarray:
        """int64 `[n]`: how long each sample's streams are."""
        return self.sizes() - self.prompt_lengths

    def num_weighted(self) -> np.ndarray:
        """int64 `[n]`: tokens of each sample that have a weight."""
        if self.of_all:
            return self.of_all.num_weighted
        return np.array([np.count_nonzero(weights > 0) for weights in self.weights])

    def parts(self, sample: int) -> list[tuple[int, int]]:
        """(first, stop) of each part of a sample: it feeds the tokens before stop - 1, and its own
        are those that follow from `first` to there."""
        prompt = int(self.prompt_lengths[sample])
        ends = [*self.splits.get(sample, ()), prompt + len(self.logprobs[sample])]
        return list(pairwise([prompt, *ends]))

    def fed(self, sample: int) -> np.ndarray:
        """The tokens fed of a sample, of all its parts in turn."""
        ids = self.token_ids[sample]
        return np.concatenate([ids[: stop - 1] for _, stop in self.parts(sample)])

    def lengths(self) -> np.ndarray:
        """Tokens fed of each sample: L - 1, and as many again of each further part as it has."""
        return np.diff(self.offsets)

    def followers(self, samples: Sequence[int] | np.ndarray) -> dict[int, int]:
        """Of samples that are packed together, those whose prompt another one feeds, and which."""
        return {} if self.alike is None else followers(self.alike, samples)

    def fed_together(self, samples: Sequence[int] | np.ndarray) -> int:
        """Tokens fed of samples that are packed together."""
        mine = np.asarray(samples, dtype=np.int64)
        every = (self.offsets[mine + 1] - self.offsets[mine]).sum()
        return int(every - self.prompt_lengths[list(self.followers(mine))].sum())

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 `[n + 1]`, the first row of each sample in the route table."""
        lengths = self.sizes() - 1
        for sample, splits in self.splits.items():
            lengths[sample] += sum(stop - 1 for stop in splits)
        return np.concatenate([[0], np.cumsum(lengths)])


def _earlier(signals: Sequence[Signal]) -> list[np.ndarray] | None:
    """What signals say was earned before the ends of samples; None when none says anything."""
    if all(signal.earlier is None for signal in signals):
        return None
    return [
        one
        for signal in signals
        for one in signal.earlier or [np.zeros(len(w)) for w in signal.weights]
    ]


def _conversations(groups: Sequence[Group]) -> np.ndarray | None:
    """The number of each sample's conversation in the step; None where each is one of its own."""
    if all(group.conversations is None for group in groups):
        return None
    firsts = np.cumsum([0, *(len(group.ends) for group in groups)])
    pairs = zip(groups, firsts[:-1], strict=True)
    return np.concatenate([first + group.conversation_of for group, first in pairs])


STREAMS = ("token_ids", "logprobs", "versions", "advantages", "weights", "masks")
OPTIONAL = ("targets", "marks", "teacher_ids", "teacher_logprobs")
