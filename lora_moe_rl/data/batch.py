"""Samples to packed micro-batches: which samples go together on which rank, and their tensors.

Shape letters: n samples, T packed tokens of a micro-batch. A sample of L tokens is fed as its first
L - 1: position i predicts token i + 1, which is also how the route table counts its rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_moe_rl.data.samples import Sample


@dataclass
class TrainBatch:
    """What the trainer needs of one step's samples. Light: routes travel beside it.

    token_ids: int32 `[L_i]` a sample. prompt_lengths: int `[n]`. logprobs: float32 `[R_i]`, the
    rollout's. advantages: float32 `[n]`. weights: float32 `[n]`, 0 for a sample left out of the
    loss. mini_batch: int `[n]`, the optimizer step that uses the sample. step: of the run, from 1;
    0 for a forward outside steps.
    """

    token_ids: list[np.ndarray]
    prompt_lengths: np.ndarray
    logprobs: list[np.ndarray]
    advantages: np.ndarray
    weights: np.ndarray
    mini_batch: np.ndarray
    step: int = 1

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Sample],
        advantages: np.ndarray,
        weights: np.ndarray,
        mini_batch: np.ndarray | None = None,
        step: int = 1,
    ) -> TrainBatch:
        n = len(samples)
        return cls(
            [s.token_ids for s in samples],
            np.array([len(s.prompt_ids) for s in samples]),
            [s.logprobs for s in samples],
            np.asarray(advantages, dtype=np.float32),
            np.asarray(weights, dtype=np.float32),
            np.zeros(n, dtype=np.int64) if mini_batch is None else mini_batch,
            step,
        )

    @classmethod
    def from_sequences(cls, sequences: Sequence[Sequence[int]]) -> TrainBatch:
        """Whole sequences to be scored: every token after the first counts as response."""
        n = len(sequences)
        return cls(
            [np.asarray(s, dtype=np.int32) for s in sequences],
            np.ones(n, dtype=np.int64),
            [np.zeros(len(s) - 1, dtype=np.float32) for s in sequences],
            np.zeros(n, dtype=np.float32),
            np.ones(n, dtype=np.float32),
            np.zeros(n, dtype=np.int64),
            step=0,
        )

    def lengths(self) -> np.ndarray:
        """Tokens fed of each sample: L - 1."""
        return np.array([len(ids) - 1 for ids in self.token_ids])


def plan_micro_batches(
    samples: Sequence[int],
    lengths: np.ndarray,
    max_tokens: int,
    dp_size: int,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """`plan[dp_rank]` is that rank's micro-batches, each a list of sample numbers.

    All ranks get the same number of micro-batches, a multiple of `multiple`, since expert
    parallelism makes them meet in each. Longest first into the emptiest micro-batch; a sample
    longer than max_tokens has one of its own. With fewer samples than ranks some micro-batches are
    empty.
    """
    order = sorted(samples, key=lambda i: (-lengths[i], i))
    total = sum(int(lengths[i]) for i in samples)
    unit = dp_size * multiple
    count = max(1, math.ceil(total / (max_tokens * unit))) * unit
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        sizes = [0] * count
        for i in order:
            emptiest = sizes.index(min(sizes))
            bins[emptiest].append(i)
            sizes[emptiest] += int(lengths[i])
        crowded = any(size > max_tokens and len(b) > 1 for b, size in zip(bins, sizes, strict=True))
        if not crowded:
            return [[sorted(b) for b in bins[rank::dp_size]] for rank in range(dp_size)]
        count += unit


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch as numpy arrays; every array has T entries.

    `rows` are rows of the route table (-1: none), `counted` marks tokens of real samples, `mask`
    those whose prediction is a response token in the loss.
    """

    samples: tuple[int, ...]
    input_ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    rows: np.ndarray
    counted: np.ndarray
    response: np.ndarray
    mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray

    @property
    def max_seqlen(self) -> int:
        return int(np.diff(self.cu_seqlens).max())


def pack(batch: TrainBatch, samples: Sequence[int], multiple: int, at_least: int = 0) -> MicroBatch:
    """Packs the samples one after the other; padding up to a multiple of `multiple` tokens, and to
    `at_least` (at least one token for an empty micro-batch), is a sequence of its own at the
    end."""
    offsets = np.concatenate([[0], np.cumsum(batch.lengths())])
    lengths = [len(batch.token_ids[i]) - 1 for i in samples]
    total = sum(lengths)
    padding = -(-max(total, at_least, 1) // multiple) * multiple - total
    lengths_all = lengths + ([padding] if padding else [])

    def join(parts, fill, dtype):
        return np.concatenate([*parts, np.full(padding, fill)]).astype(dtype)

    responses, rollout = [], []
    for i in samples:
        before = int(batch.prompt_lengths[i]) - 1
        after = len(batch.token_ids[i]) - 1 - before
        responses.append(np.arange(before + after) >= before)
        rollout.append(np.concatenate([np.zeros(before, np.float32), batch.logprobs[i]]))
    response = join(responses, False, bool)
    per_token = [np.full(n, i) for n, i in zip(lengths, samples, strict=True)]
    sample_of = join(per_token, 0, np.int64)
    counted = join([np.ones(total)], 0, bool)
    return MicroBatch(
        samples=tuple(samples),
        input_ids=join([batch.token_ids[i][:-1] for i in samples], 0, np.int64),
        labels=join([batch.token_ids[i][1:] for i in samples], 0, np.int64),
        positions=np.concatenate([np.arange(n) for n in lengths_all]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths_all)]).astype(np.int32),
        rows=join([np.arange(offsets[i], offsets[i + 1]) for i in samples], -1, np.int64),
        counted=counted,
        response=response,
        mask=response & (batch.weights[sample_of] > 0),
        rollout_logprobs=join(rollout, 0, np.float32),
        advantages=np.where(counted, batch.advantages[sample_of], 0).astype(np.float32),
    )


def unpack(micro_batch: MicroBatch, values: np.ndarray) -> dict[int, np.ndarray]:
    """Per-token values `[T]` back to `{sample: [R]}` of its response tokens."""
    out = {}
    for k, sample in enumerate(micro_batch.samples):
        span = slice(micro_batch.cu_seqlens[k], micro_batch.cu_seqlens[k + 1])
        out[sample] = values[span][micro_batch.response[span]]
    return out
