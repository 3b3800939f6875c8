"""The streams of a step's samples: an array of each, or of those alone that a rank trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Stream = Sequence[np.ndarray]


class Some(Sequence[np.ndarray]):
    """The arrays of some of `total` samples. Raises ValueError when asked for another one's, which
    is on another rank."""

    def __init__(self, total: int, found: dict[int, np.ndarray]):
        self.total, self.found = total, found

    @classmethod
    def of(cls, stream: Stream, samples: Iterable[int]) -> Some:
        return cls(len(stream), {sample: stream[sample] for sample in samples})

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, sample: Any) -> Any:
        try:
            return self.found[sample]
        except KeyError:
            raise ValueError(
                f"sample {sample} is trained by another rank: it is not here"
            ) from None


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
        if isinstance(stream, Some):
            whole = cls.of(list(stream.found.values()))
            numbers = np.array(list(stream.found), np.int64)
            return whole._replace(samples=numbers, total=stream.total)
        if len(dtypes := {array.dtype for array in stream}) > 1:
            raise TypeError(f"a stream has one dtype, not {', '.join(sorted(map(str, dtypes)))}")
        starts = np.cumsum([0, *map(len, stream)])
        return cls(np.concatenate(stream) if len(stream) else np.zeros(0), starts)

    def stream(self) -> Stream:
        places = self.starts.tolist()
        arrays = [self.values[start:end] for start, end in pairwise(places)]
        if self.samples is None:
            return arrays
        return Some(self.total, dict(zip(self.samples.tolist(), arrays, strict=True)))
