"""Samples packed into micro-batches, and values of their tokens back to the samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import NOT_SAMPLED


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch as numpy arrays; those of tokens have T entries, entry t of which
    tells of the token that is predicted at t. What follows from the samples is made when it is
    asked for: a step has many micro-batches, and one of them is worked on at a time.

    `input_ids` and `labels`: int32. `response` marks tokens after a prompt, each in the part whose
    own it is; `weights` is above 0 for those in the loss. `starts`: int64 `[samples + 1]`, where
    each sample begins, and where the padding does; `cu_seqlens` has every part as a sequence.
    `first_rows` and `copies_of`: int64 `[samples]`, the first row of each in the route table, and
    how many times it stands in the loss.

    `fed`: int64 `[F]`, the entries whose tokens the model is fed, in turn: all but prompts that a
    sample before them feeds. `fed_at`: int64 `[T]`, which of those stands for each entry.
    """

    samples: tuple[int, ...]
    input_ids: np.ndarray
    labels: np.ndarray
    cu_seqlens: np.ndarray
    response: np.ndarray
    rollout_logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    first_rows: np.ndarray
    copies_of: np.ndarray
    fed: np.ndarray
    fed_at: np.ndarray

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
        counted = np.zeros(len(self.labels), bool)
        counted[: self.starts[-1]] = True
        return counted

    @property
    def places(self) -> np.ndarray:
        """int64 [T], the place of each token's sample in `samples`, whose length stands for
        padding."""
        lengths = np.diff(self.starts, append=len(self.labels))
        return np.repeat(np.arange(len(lengths)), lengths)

    @property
    def sample_of(self) -> np.ndarray:
        """int64 [T], the number of each token's sample; -1 for padding."""
        return np.append(np.array(self.samples, np.int64), -1)[self.places]

    @property
    def copies(self) -> np.ndarray:
        """int64 [T], how many times each token's sample stands in the loss; 0 for padding."""
        return np.append(self.copies_of, 0)[self.places]

    @property
    def rows(self) -> np.ndarray:
        """int64 [T], each token's row in the route table; -1 for padding."""
        shifts = np.append(self.first_rows - self.starts[:-1], 0)[self.places]
        return np.where(self.counted, np.arange(len(shifts)) + shifts, -1)

    @property
    def positions(self) -> np.ndarray:
        """int64 [T], of each token in its sequence."""
        return _positions(self.cu_seqlens)

    @property
    def max_seqlen(self) -> int:
        return int(np.diff(self.cu_seqlens).max())

    @property
    def shares(self) -> bool:
        """Whether some entries have their token fed by others."""
        return len(self.fed) < len(self.fed_at)


def pack(batch: TrainBatch, samples: Sequence[int], multiple: int, at_least: int = 0) -> MicroBatch:
    """Packs the samples one after the other; padding up to a multiple of `multiple` tokens fed, and
    to `at_least` (at least one token for an empty micro-batch), is a sequence of its own at the
    end."""
    numbers, parts = np.asarray(samples, dtype=np.int64), [batch.parts(i) for i in samples]
    sequences = [(i, *one) for i, of_one in zip(samples, parts, strict=True) for one in of_one]
    tokens = [batch.token_ids[i][:stop] for i, _, stop in sequences]
    total, followers = sum(len(ids) - 1 for ids in tokens), batch.followers(numbers)
    fed_once = total - int(batch.prompt_lengths[list(followers)].sum())
    filled = -(-max(fed_once, at_least, 1) // multiple) * multiple
    size = total + filled - fed_once
    padding = [size - total] if size > total else []
    lengths = [*(len(ids) - 1 for ids in tokens), *padding]
    cu_seqlens = np.cumsum([0, *lengths])
    predicting = [first - 1 for _, first, _ in sequences]  # the position of the first own token
    own = np.repeat(np.array([*predicting, *(size for _ in padding)], np.int64), lengths)
    begins, ends = cu_seqlens[: len(tokens)].tolist(), cu_seqlens[1 : len(tokens) + 1].tolist()
    of_own = [begin + position for begin, position in zip(begins, predicting, strict=True)]
    starts = cu_seqlens[np.cumsum([0, *map(len, parts)])]
    begin = dict(zip(samples, starts.tolist(), strict=False))
    shared = [
        (begin[sample], begin[leader], int(batch.prompt_lengths[sample]))
        for sample, leader in followers.items()
    ]
    fed, fed_at = _fed(size, shared)

    def stream(values: Sequence[np.ndarray], fill: float, dtype: type):
        """A per-token stream at the places that predict its tokens."""
        prompts = batch.prompt_lengths
        pieces = (values[i][first - prompts[i] : stop - prompts[i]] for i, first, stop in sequences)
        return _placed(size, pieces, of_own, ends, fill, dtype)

    return MicroBatch(
        samples=tuple(samples),
        input_ids=_placed(size, (ids[:-1] for ids in tokens), begins, ends, 0, np.int32),
        labels=_placed(size, (ids[1:] for ids in tokens), begins, ends, 0, np.int32),
        cu_seqlens=cu_seqlens.astype(np.int32),
        response=_positions(cu_seqlens) >= own,
        rollout_logprobs=stream(batch.logprobs, 0, np.float32),
        versions=stream(batch.versions, NOT_SAMPLED, np.int32),
        advantages=stream(batch.advantages, 0, np.float32),
        weights=stream(batch.weights, 0, np.float32),
        starts=starts,
        first_rows=batch.offsets[numbers],
        copies_of=batch.copies[numbers],
        fed=fed,
        fed_at=fed_at,
    )


def _positions(cu_seqlens: np.ndarray) -> np.ndarray:
    """int64 `[T]`, of each token in its sequence."""
    return np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))


def _fed(size: int, shared: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Which entries are fed, and which of these stands for each. `shared`: where a prompt begins
    that is not fed, where the same one begins that is, and how long it is."""
    if not shared:
        every = np.arange(size)
        return every, every
    own = np.ones(size, dtype=bool)
    for start, _, length in shared:
        own[start : start + length] = False
    fed_at = np.cumsum(own) - 1
    for start, same, length in shared:
        fed_at[start : start + length] = fed_at[same : same + length]
    return np.flatnonzero(own), fed_at


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
