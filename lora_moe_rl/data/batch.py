"""Samples to packed micro-batches: what a step has of its samples, and the tensors of some of them.

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
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_moe_rl.data.samples import NOT_SAMPLED, Group, Sample

if TYPE_CHECKING:
    from lora_moe_rl.algorithms.base import Signal


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

    It is pickled with all samples of a stream in one array: to hand a hundred thousand small arrays
    to another process takes longer than the step's other work for them.
    """

    token_ids: list[np.ndarray]
    prompt_lengths: np.ndarray
    logprobs: list[np.ndarray]
    versions: list[np.ndarray]
    advantages: list[np.ndarray]
    weights: list[np.ndarray]
    masks: list[np.ndarray]
    mini_batch: np.ndarray
    groups: np.ndarray
    copies: np.ndarray
    step: int = 1
    rewards: np.ndarray | None = None
    splits: dict[int, tuple[int, ...]] = field(default_factory=dict)

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
        return cls(
            [s.token_ids for s in samples],
            np.array([len(s.prompt_ids) for s in samples]),
            [s.logprobs for s in samples],
            [s.versions for s in samples],
            list(advantages),
            list(weights),
            [s.mask for s in samples],
            none if mini_batch is None else mini_batch,
            none if groups is None else groups,
            none + 1,
            step,
            splits={i: sample.splits for i, sample in enumerate(samples) if sample.splits},
        )

    @classmethod
    def from_groups(
        cls, groups: Sequence[Group], signals: Sequence[Signal], mini_batches: int, step: int
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
        copies = [signal.copies for signal in signals if signal.copies is not None]
        batch.copies = np.concatenate(copies) if copies else batch.copies
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
        return self.__dict__ | {name: _flat(getattr(self, name)) for name in STREAMS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {name: _split(*state[name]) for name in STREAMS}

    def parts(self, sample: int) -> list[tuple[int, int]]:
        """(first, stop) of each part of a sample: it feeds the tokens before stop - 1, and its own
        are those that follow from `first` to there."""
        ends = [*self.splits.get(sample, ()), len(self.token_ids[sample])]
        return list(pairwise([int(self.prompt_lengths[sample]), *ends]))

    def fed(self, sample: int) -> np.ndarray:
        """The tokens fed of a sample, of all its parts in turn."""
        ids = self.token_ids[sample]
        return np.concatenate([ids[: stop - 1] for _, stop in self.parts(sample)])

    def lengths(self) -> np.ndarray:
        """Tokens fed of each sample: L - 1, and as many again of each further part as it has."""
        lengths = np.array([len(ids) - 1 for ids in self.token_ids])
        for sample, splits in self.splits.items():
            lengths[sample] += sum(stop - 1 for stop in splits)
        return lengths

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 `[n + 1]`, the first row of each sample in the route table."""
        return np.concatenate([[0], np.cumsum(self.lengths())])


STREAMS = ("token_ids", "logprobs", "versions", "advantages", "weights", "masks")


def _flat(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The arrays behind each other, and where each begins, int64 `[n + 1]`. Raises TypeError for
    arrays of different dtypes, which would come out as another one."""
    if len(dtypes := {array.dtype for array in arrays}) > 1:
        raise TypeError(f"a stream has one dtype, not {', '.join(sorted(map(str, dtypes)))}")
    starts = np.cumsum([0, *map(len, arrays)])
    return np.concatenate(arrays) if len(arrays) else np.zeros(0), starts


def _split(values: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
    places = starts.tolist()
    return [values[start:end] for start, end in pairwise(places)]


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch as numpy arrays; every array has T entries, entry t of which tells of
    the token that is predicted at t.

    `rows` are rows of the route table (-1: none), `sample_of` numbers of samples (-1: padding),
    `response` marks tokens after a prompt, each in the part whose own it is; `weights` is above 0
    for those in the loss. `copies`: int64, how many times each token's sample stands in the loss;
    0 for padding. `starts`: int64 `[samples + 1]`, where each sample begins, and where the
    padding does; `cu_seqlens` has every part as a sequence.
    """

    samples: tuple[int, ...]
    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    rows: np.ndarray
    sample_of: np.ndarray
    response: np.ndarray
    rollout_logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    copies: np.ndarray
    starts: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """bool [T], True for tokens in the loss."""
        return self.weights > 0

    @property
    def sampled(self) -> np.ndarray:
        """bool [T], True for tokens that a policy sampled."""
        return self.versions != NOT_SAMPLED

    @property
    def counted(self) -> np.ndarray:
        """bool [T], False for padding."""
        return self.sample_of >= 0

    @property
    def places(self) -> np.ndarray:
        """int64 [T], the place of each token's sample in `samples`, whose length stands for
        padding."""
        lengths = np.diff(self.starts, append=len(self.labels))
        return np.repeat(np.arange(len(lengths)), lengths)

    @property
    def max_seqlen(self) -> int:
        return int(np.diff(self.cu_seqlens).max())


def pack(batch: TrainBatch, samples: Sequence[int], multiple: int, at_least: int = 0) -> MicroBatch:
    """Packs the samples one after the other; padding up to a multiple of `multiple` tokens, and to
    `at_least` (at least one token for an empty micro-batch), is a sequence of its own at the
    end."""
    numbers, parts = np.asarray(samples, dtype=np.int64), [batch.parts(i) for i in samples]
    sequences = [(i, *one) for i, of_one in zip(samples, parts, strict=True) for one in of_one]
    tokens = [batch.token_ids[i][:stop] for i, _, stop in sequences]
    total = sum(len(ids) - 1 for ids in tokens)
    size = -(-max(total, at_least, 1) // multiple) * multiple
    padding = [size - total] if size > total else []
    lengths = [*(len(ids) - 1 for ids in tokens), *padding]
    cu_seqlens = np.cumsum([0, *lengths])
    positions = np.arange(size) - np.repeat(cu_seqlens[:-1], lengths)
    predicting = [first - 1 for _, first, _ in sequences]  # the position of the first own token
    own = np.repeat(np.array([*predicting, *(size for _ in padding)], np.int64), lengths)
    begins, ends = cu_seqlens[: len(tokens)].tolist(), cu_seqlens[1 : len(tokens) + 1].tolist()
    of_own = [begin + position for begin, position in zip(begins, predicting, strict=True)]
    starts = cu_seqlens[np.cumsum([0, *map(len, parts)])]
    places = np.repeat(np.arange(len(starts)), np.diff(starts, append=size))
    rows = np.append(batch.offsets[numbers], 0)[places] + np.arange(size) - starts[places]

    def stream(values: Sequence[np.ndarray], fill: float, dtype: type):
        """A per-token stream at the places that predict its tokens."""
        prompts = batch.prompt_lengths
        pieces = (values[i][first - prompts[i] : stop - prompts[i]] for i, first, stop in sequences)
        return _placed(size, pieces, of_own, ends, fill, dtype)

    return MicroBatch(
        samples=tuple(samples),
        input_ids=_placed(size, (ids[:-1] for ids in tokens), begins, ends, 0, np.int64),
        labels=_placed(size, (ids[1:] for ids in tokens), begins, ends, 0, np.int64),
        positions=positions,
        cu_seqlens=cu_seqlens.astype(np.int32),
        rows=np.where(places < len(numbers), rows, -1),
        sample_of=np.append(numbers, -1)[places],
        response=positions >= own,
        rollout_logprobs=stream(batch.logprobs, 0, np.float32),
        versions=stream(batch.versions, NOT_SAMPLED, np.int32),
        advantages=stream(batch.advantages, 0, np.float32),
        weights=stream(batch.weights, 0, np.float32),
        copies=np.append(batch.copies[numbers], 0)[places],
        starts=starts,
    )


def _placed(
    size: int,
    pieces: Iterable[np.ndarray],
    starts: list[int],
    ends: list[int],
    fill: float,
    dtype: type,
) -> np.ndarray:
    """`[size]`: each piece from its start to its end, `fill` everywhere else."""
    joined = np.full(size, fill, dtype)
    for piece, start, end in zip(pieces, starts, ends, strict=True):
        joined[start:end] = piece
    return joined


def unpack(micro_batch: MicroBatch, values: np.ndarray) -> dict[int, np.ndarray]:
    """Per-token values `[T]` back to `{sample: [R]}` of its response tokens."""
    out = {}
    for sample, (start, stop) in zip(
        micro_batch.samples, pairwise(micro_batch.starts), strict=True
    ):
        out[sample] = values[start:stop][micro_batch.response[start:stop]]
    return out


def stream_of(micro_batch: MicroBatch, values: Sequence[np.ndarray]) -> np.ndarray:
    """float32 `[T]`: `values`, `[R]` of every sample of the step, at the places that predict their
    tokens, 0 elsewhere. Undone by `unpack`."""
    stream = np.zeros(len(micro_batch.labels), np.float32)
    for sample, (start, stop) in zip(
        micro_batch.samples, pairwise(micro_batch.starts), strict=True
    ):
        stream[start:stop][micro_batch.response[start:stop]] = values[sample]
    return stream
