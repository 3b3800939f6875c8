"""Samples packed into micro-batches, and values of their tokens back to the samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import NOT_SAMPLED
from lora_moe_rl.data.streams import Stream


class Sequences(NamedTuple):
    """Which tokens of which samples a micro-batch's sequences are, and where they lie in it.

    pieces: (sample, first of its own tokens in its streams, where they end there) of each sequence.
    begins, own and ends: the entries where it begins, where it predicts the first of them, and
    where it ends.
    """

    pieces: list[tuple[int, int, int]]
    begins: list[int]
    own: list[int]
    ends: list[int]

    @classmethod
    def of(
        cls, batch: TrainBatch, parts: Sequence[tuple[int, int, int]], cu_seqlens: np.ndarray
    ) -> Sequences:
        """parts: (sample, first, stop) of each, as `TrainBatch.parts` has them."""
        places = cu_seqlens[: len(parts) + 1].tolist()
        prompts = batch.prompt_lengths[[sample for sample, _, _ in parts]].tolist()
        return cls(
            [(i, first - p, stop - p) for (i, first, stop), p in zip(parts, prompts, strict=True)],
            places[:-1],
            [begin + first - 1 for begin, (_, first, _) in zip(places, parts)],
            places[1:],
        )

    def tokens(self, batch: TrainBatch, size: int, after: int) -> np.ndarray:
        """int32 `[size]`, the token that stands `after` tokens after each entry's own."""
        joined = np.zeros(size, np.int32)
        for (sample, _, _), begin, end in zip(self.pieces, self.begins, self.ends, strict=True):
            joined[begin:end] = batch.token_ids[sample][after : after + end - begin]
        return joined

    def stream(self, values: Stream, size: int, fill: float, dtype: type) -> np.ndarray:
        """`[size]`: a per-token stream at the places that predict its tokens, `fill` elsewhere; as
        wide as its values are."""
        width = values[self.pieces[0][0]].shape[1:] if self.pieces else ()
        joined = np.full((size, *width), fill, dtype)
        for (sample, first, stop), own, end in zip(self.pieces, self.own, self.ends, strict=True):
            joined[own:end] = values[sample][first:stop]
        return joined


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch as numpy arrays; those of tokens have T entries, entry t of which
    tells of the token that is predicted at t. What follows from the samples is made when it is
    asked for, and so is what is read once in a pass: a step has many micro-batches, and one of them
    is worked on at a time.

    `response` marks tokens after a prompt, each in the part whose own it is; `weights` is above 0
    for those in the loss. `starts`: int64 `[samples + 1]`, where each sample begins, and where the
    padding does; `cu_seqlens` has every part as a sequence. `first_rows` and `copies_of`: int64
    `[samples]`, the first row of each in the route table, and how many times it stands in the loss.

    `fed`: int64 `[F]`, the entries whose tokens the model is fed, in turn: all but prompts that a
    sample before them feeds. `fed_at`: int64 `[T]`, which of those stands for each entry.
    """

    batch: TrainBatch
    samples: tuple[int, ...]
    sequences: Sequences
    cu_seqlens: np.ndarray
    response: np.ndarray
    versions: np.ndarray
    weights: np.ndarray
    starts: np.ndarray
    first_rows: np.ndarray
    copies_of: np.ndarray
    fed: np.ndarray
    fed_at: np.ndarray

    @property
    def input_ids(self) -> np.ndarray:
        """int32 [T]."""
        return self.sequences.tokens(self.batch, len(self.response), 0)

    @property
    def labels(self) -> np.ndarray:
        """int32 [T], the tokens whose logprobs are wanted; [T, K] where several are at a place."""
        if self.batch.targets is not None:
            return self.sequences.stream(self.batch.targets, len(self.response), 0, np.int32)
        return self.sequences.tokens(self.batch, len(self.response), 1)

    @property
    def rollout_logprobs(self) -> np.ndarray:
        """float32 [T]."""
        return self.sequences.stream(self.batch.logprobs, len(self.response), 0, np.float32)

    @property
    def advantages(self) -> np.ndarray:
        """float32 [T], or [T, K] as labels."""
        return self.sequences.stream(self.batch.advantages, len(self.response), 0, np.float32)

    @property
    def marks(self) -> np.ndarray:
        """bool [T]."""
        assert self.batch.marks is not None
        return self.sequences.stream(self.batch.marks, len(self.response), 0, np.bool_)

    @property
    def likeliest(self) -> tuple[np.ndarray, np.ndarray]:
        """A teacher's likeliest tokens at each place, int32 [T, K], and its logprobs of them,
        float32 [T, K]. Raises ValueError where no teacher was asked for them."""
        batch, size = self.batch, len(self.response)
        if batch.teacher_ids is None or batch.teacher_logprobs is None:
            raise ValueError("no teacher has told its likeliest tokens of the step's samples")
        ids = self.sequences.stream(batch.teacher_ids, size, 0, np.int32)
        logprobs = self.sequences.stream(batch.teacher_logprobs, size, 0, np.float32)
        return ids, logprobs

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
        counted = np.zeros(len(self.response), bool)
        counted[: self.starts[-1]] = True
        return counted

    @property
    def places(self) -> np.ndarray:
        """int64 [T], the place of each token's sample in `samples`, whose length stands for
        padding."""
        return self._repeated(np.arange(len(self.samples)), len(self.samples))

    @property
    def sample_of(self) -> np.ndarray:
        """int64 [T], the number of each token's sample; -1 for padding."""
        return self._repeated(np.array(self.samples, np.int64), -1)

    @property
    def copies(self) -> np.ndarray:
        """int64 [T], how many times each token's sample stands in the loss; 0 for padding."""
        return self._repeated(self.copies_of, 0)

    @property
    def rows(self) -> np.ndarray:
        """int64 [T], each token's row in the route table; -1 for padding."""
        rows = self._repeated(self.first_rows - self.starts[:-1], 0)
        rows += np.arange(len(rows))
        rows[self.starts[-1] :] = -1
        return rows

    def _repeated(self, of_samples: np.ndarray, padding: int) -> np.ndarray:
        """[T]: for each token what its sample has."""
        lengths = np.diff(self.starts, append=len(self.response))
        return np.repeat(np.append(of_samples, padding), lengths)

    @property
    def positions(self) -> np.ndarray:
        """int64 [T], of each token in its sequence."""
        begins = np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
        return np.arange(self.cu_seqlens[-1]) - begins

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
    total, followers = sum(stop - 1 for _, _, stop in sequences), batch.followers(numbers)
    fed_once = total - int(batch.prompt_lengths[list(followers)].sum())
    filled = -(-max(fed_once, at_least, 1) // multiple) * multiple
    size = total + filled - fed_once
    padding = [size - total] if size > total else []
    lengths = [*(stop - 1 for _, _, stop in sequences), *padding]
    cu_seqlens = np.cumsum([0, *lengths])
    places = Sequences.of(batch, sequences, cu_seqlens)
    response = np.zeros(size, bool)
    for start, end in zip(places.own, places.ends, strict=True):
        response[start:end] = True
    starts = cu_seqlens[np.cumsum([0, *map(len, parts)])]
    begin = dict(zip(samples, starts.tolist(), strict=False))
    shared = [
        (begin[sample], begin[leader], int(batch.prompt_lengths[sample]))
        for sample, leader in followers.items()
    ]
    fed, fed_at = _fed(size, shared)

    return MicroBatch(
        batch=batch,
        samples=tuple(samples),
        sequences=places,
        cu_seqlens=cu_seqlens.astype(np.int32),
        response=response,
        versions=places.stream(batch.versions, size, NOT_SAMPLED, np.int32),
        weights=places.stream(batch.weights, size, 0, np.float32),
        starts=starts,
        first_rows=batch.offsets[numbers],
        copies_of=batch.copies[numbers],
        fed=fed,
        fed_at=fed_at,
    )


def _fed(size: int, shared: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Which entries are fed, and which of these stands for each. `shared`: where a prompt begins
    that is not fed, where the same one begins that is, and how long it is."""
    if not shared:
        every = np.arange(size)
        return every, every
    own = np.ones(size, dtype=bool)
    for start, _, length in shared:
        own[start : start + length] = False
    fed_at = np.cumsum(own)
    fed_at -= 1
    for start, same, length in shared:
        fed_at[start : start + length] = fed_at[same : same + length]
    return np.flatnonzero(own), fed_at


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
