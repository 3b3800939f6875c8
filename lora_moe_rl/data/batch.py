"""Samples to packed micro-batches: which samples go together on which rank, and their tensors.

Shape letters: n samples, T packed tokens of a micro-batch. A sample of L tokens is fed as its first
L - 1: position i predicts token i + 1, which is also how the route table counts its rows.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapreplace
from typing import TYPE_CHECKING

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
    float32, what each token weighs in the loss; 0 leaves it out. mini_batch: int `[n]`, the
    optimizer step that uses the sample. groups: int `[n]`, the number of the sample's group. step:
    of the run, from 1; 0 for a forward outside steps. rewards: float64 `[n]`, NaN for none, for an
    algorithm that revises its advantages; None for others.
    """

    token_ids: list[np.ndarray]
    prompt_lengths: np.ndarray
    logprobs: list[np.ndarray]
    versions: list[np.ndarray]
    advantages: list[np.ndarray]
    weights: list[np.ndarray]
    mini_batch: np.ndarray
    groups: np.ndarray
    step: int = 1
    rewards: np.ndarray | None = None

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
        """By default all samples are of one optimizer step, and of one group."""
        none = np.zeros(len(samples), dtype=np.int64)
        return cls(
            [s.token_ids for s in samples],
            np.array([len(s.prompt_ids) for s in samples]),
            [s.logprobs for s in samples],
            [s.versions for s in samples],
            list(advantages),
            list(weights),
            none if mini_batch is None else mini_batch,
            none if groups is None else groups,
            step,
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
            np.zeros(len(sequences), dtype=np.int64),
            np.zeros(len(sequences), dtype=np.int64),
            step,
        )

    def lengths(self) -> np.ndarray:
        """Tokens fed of each sample: L - 1."""
        return np.array([len(ids) - 1 for ids in self.token_ids])

    @cached_property
    def offsets(self) -> np.ndarray:
        """int64 `[n + 1]`, the first row of each sample in the route table."""
        return np.concatenate([[0], np.cumsum(self.lengths())])


def plan_micro_batches(
    samples: Sequence[int],
    lengths: np.ndarray,
    max_tokens: int,
    dp_size: int,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """`plan[dp_rank]` is that rank's micro-batches, each a list of sample numbers.

    All ranks get the same number of micro-batches, a multiple of `multiple`, since expert
    parallelism makes them meet in each. Longest first into the emptiest micro-batch, of as few as
    can be; a sample longer than max_tokens has one of its own. With fewer samples than ranks some
    micro-batches are empty.
    """
    numbers = np.asarray(samples, dtype=np.int64)
    order = numbers[np.lexsort((numbers, -lengths[numbers]))]
    count, places = _fewest(lengths[order], max_tokens, dp_size * multiple)
    bins: list[list[int]] = [[] for _ in range(count)]
    for sample, number in zip(order.tolist(), places, strict=True):
        bins[number].append(sample)
    return [[sorted(b) for b in bins[rank::dp_size]] for rank in range(dp_size)]


def _fewest(sizes: np.ndarray, max_tokens: int, unit: int) -> tuple[int, array[int]]:
    """The fewest micro-batches, in steps of `unit`, that hold samples of `sizes`, longest first;
    and the one that each is in.

    As `_emptiest_first` fills them, one more never makes the fullest any fuller: where some number
    is enough every larger one is, so that the fewest are found by halving.
    """
    fed = sizes[sizes > 0]
    most = np.maximum(1, max_tokens // fed)  # of those at least as long, in one micro-batch
    needed = -(-np.arange(1, len(fed) + 1) // most)
    least = max(math.ceil(int(sizes.sum()) / max_tokens), int(needed.max(initial=1)))
    too_few, enough = math.ceil(least / unit) - 1, math.ceil(least / unit)
    known = sizes.tolist()
    while (found := _emptiest_first(known, enough * unit, max_tokens)) is None:
        too_few, enough = enough, 2 * enough - too_few
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if (fewer := _emptiest_first(known, middle * unit, max_tokens)) is None:
            too_few = middle
        else:
            enough, found = middle, fewer
    return enough * unit, found


def _emptiest_first(sizes: list[int], count: int, max_tokens: int) -> array[int] | None:
    """The micro-batch of each sample when one after the other goes into the emptiest of `count`;
    None when several samples of one would be more than max_tokens."""
    heap = list(range(count))  # tokens * count + the number of the micro-batch
    places = array("q")
    for size in sizes:
        tokens, number = divmod(heap[0], count)
        if tokens and tokens + size > max_tokens:
            return None
        places.append(number)
        heapreplace(heap, heap[0] + size * count)
    return places


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch as numpy arrays; every array has T entries, entry t of which tells of
    the token that is predicted at t.

    `rows` are rows of the route table (-1: none), `sample_of` numbers of samples (-1: padding),
    `response` marks tokens after a prompt; `weights` is above 0 for those in the loss.
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
        lengths = np.diff(self.cu_seqlens)
        return np.repeat(np.arange(len(lengths)), lengths)

    @property
    def max_seqlen(self) -> int:
        return int(np.diff(self.cu_seqlens).max())


def pack(batch: TrainBatch, samples: Sequence[int], multiple: int, at_least: int = 0) -> MicroBatch:
    """Packs the samples one after the other; padding up to a multiple of `multiple` tokens, and to
    `at_least` (at least one token for an empty micro-batch), is a sequence of its own at the
    end."""
    numbers, tokens = np.asarray(samples, dtype=np.int64), [batch.token_ids[i] for i in samples]
    total = sum(len(ids) - 1 for ids in tokens)
    size = -(-max(total, at_least, 1) // multiple) * multiple
    lengths = [len(ids) - 1 for ids in tokens] + ([size - total] if size > total else [])
    cu_seqlens = np.cumsum([0, *lengths])
    places = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(size) - cu_seqlens[places]
    predicting = batch.prompt_lengths[numbers] - 1  # the position that predicts the first response
    begins, ends = cu_seqlens[: len(tokens)], cu_seqlens[1 : len(tokens) + 1].tolist()
    responses = (begins + predicting).tolist()
    rows = np.append(batch.offsets[numbers], 0)[places] + positions

    def join(parts: Iterable[np.ndarray], starts: list[int], fill: float, dtype: type):
        """The part of each sample from its start to the sample's end, `fill` everywhere else."""
        joined = np.full(size, fill, dtype)
        for part, start, end in zip(parts, starts, ends, strict=True):
            joined[start:end] = part
        return joined

    def stream(values: Sequence[np.ndarray], fill: float, dtype: type):
        """A per-token stream at the places that predict its tokens."""
        return join((values[i] for i in samples), responses, fill, dtype)

    return MicroBatch(
        samples=tuple(samples),
        input_ids=join((ids[:-1] for ids in tokens), begins.tolist(), 0, np.int64),
        labels=join((ids[1:] for ids in tokens), begins.tolist(), 0, np.int64),
        positions=positions,
        cu_seqlens=cu_seqlens.astype(np.int32),
        rows=np.where(places < len(tokens), rows, -1),
        sample_of=np.append(numbers, -1)[places],
        response=positions >= np.append(predicting, size)[places],
        rollout_logprobs=stream(batch.logprobs, 0, np.float32),
        versions=stream(batch.versions, NOT_SAMPLED, np.int32),
        advantages=stream(batch.advantages, 0, np.float32),
        weights=stream(batch.weights, 0, np.float32),
    )


def unpack(micro_batch: MicroBatch, values: np.ndarray) -> dict[int, np.ndarray]:
    """Per-token values `[T]` back to `{sample: [R]}` of its response tokens."""
    out = {}
    for k, sample in enumerate(micro_batch.samples):
        span = slice(micro_batch.cu_seqlens[k], micro_batch.cu_seqlens[k + 1])
        out[sample] = values[span][micro_batch.response[span]]
    return out


def stream_of(micro_batch: MicroBatch, values: Sequence[np.ndarray]) -> np.ndarray:
    """float32 `[T]`: `values`, `[R]` of every sample of the step, at the places that predict their
    tokens, 0 elsewhere. Undone by `unpack`."""
    stream = np.zeros(len(micro_batch.labels), np.float32)
    for k, sample in enumerate(micro_batch.samples):
        span = slice(micro_batch.cu_seqlens[k], micro_batch.cu_seqlens[k + 1])
        stream[span][micro_batch.response[span]] = values[sample]
    return stream
