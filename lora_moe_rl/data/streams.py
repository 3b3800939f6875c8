"""The streams of a step's samples: an array of each, or of those alone that a rank trains; in two
parts that are put together when one is asked for, or all behind each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

Stream = Sequence[np.ndarray]


class Some(Sequence[np.ndarray]):
    """The arrays of some of `total` samples. Raises ValueError when asked for another one's, which
    is on another rank."""

    def __init__(self, total: int, found: dict[int, np.ndarray]):
        self.total, self.found = total, found

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, sample: Any) -> Any:
        try:
            return self.found[sample]
        except KeyError:
            raise ValueError(
                f"sample {sample} is trained by another rank: it is not here"
            ) from None


class Joined(Sequence[np.ndarray]):
    """Of each sample its array in `firsts` and its array in `seconds`, one after the other. All of
    them put together are as many bytes again as a step has."""

    def __init__(self, firsts: Stream, seconds: Stream):
        self.firsts, self.seconds = firsts, seconds

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, sample: Any) -> Any:
        if isinstance(sample, slice):
            return [self[one] for one in range(*sample.indices(len(self)))]
        joined = np.concatenate([self.firsts[sample], self.seconds[sample]])
        joined.setflags(write=False)  # it would be lost
        return joined


def some_of(stream: Stream, samples: Sequence[int]) -> Stream:
    """The arrays of some of the samples, by their numbers."""
    if isinstance(stream, Joined):
        return Joined(some_of(stream.firsts, samples), some_of(stream.seconds, samples))
    return Some(len(stream), {sample: stream[sample] for sample in samples})


class Flat(NamedTuple):
    """A stream as it travels, in one array: a hundred thousand small ones take longer to hand to
    another process than the step's other work for them. `values` are the arrays behind each other,
    `starts` int64 `[n + 1]` where each begins; of some samples alone their numbers and of how many
    they are."""

    values: np.ndarray
    starts: np.ndarray
    samples: np.ndarray | None = None
    total: int = 0

    @classmethod
    def of(cls, stream: Stream) -> Flat:
        parts = (stream.firsts, stream.seconds) if isinstance(stream, Joined) else (stream,)
        some = [part for part in parts if isinstance(part, Some)]
        if some:
            whole = cls._of([list(part.found.values()) for part in some])
            numbers = np.array(list(some[0].found), np.int64)
            return whole._replace(samples=numbers, total=some[0].total)
        return cls._of(parts)

    @classmethod
    def _of(cls, parts: Sequence[Stream]) -> Flat:
        """Each sample's arrays in all the parts."""
        arrays = list(chain.from_iterable(zip(*parts, strict=True)))
        if len(dtypes := {array.dtype for array in arrays}) > 1:
            raise TypeError(f"a stream has one dtype, not {', '.join(sorted(map(str, dtypes)))}")
        ends = np.cumsum([0, *map(len, arrays)])
        return cls(np.concatenate(arrays) if arrays else np.zeros(0), ends[:: len(parts)])

    def stream(self) -> Stream:
        places = self.starts.tolist()
        arrays = [self.values[start:end] for start, end in pairwise(places)]
        if self.samples is None:
            return arrays
        return Some(self.total, dict(zip(self.samples.tolist(), arrays, strict=True)))
