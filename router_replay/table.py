"""The route table: which experts each token of each sample was sent to.

One row a token that was fed to the model. A sample of L tokens (prompt and response) has L - 1
rows: row i holds the experts of the forward of token i, which predicts token i + 1; the last
sampled token is never fed, so it has none:

    token     p0   p1   p2   r0   r1   r2=end
    row        0    1    2    3    4    -
    predicts  p1   p2   r0   r1   r2

Columns are indexed by global layer number through `layers`; dense layers have no column.

A sample of several turns is recorded in several requests. Each is fed all tokens so far, so that
rows are there more than once; the earliest forward of a token counts, since its successors were
sampled from it:

    token       p0   p1   r0   r1=end   t0   t1   q0   q1=end      t: a tool's answer
    request 1    0    1    2
    request 2   (0)  (1)  (2)   3       4    5    6                (0): there already
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import xxhash

from lora_moe_rl.errors import ReplayError

UNKNOWN = 0  # the sum of tokens that nobody was told
_ROWS_AT_ONCE = 1 << 15
_MOST_PAIRED = 32  # experts a token; pairs grow with its square


@dataclass(frozen=True)
class Segment:
    """Rows that one request recorded: of the sample's tokens from `start` on.

    ids: integers `[n, moe_layers, top_k]`.
    """

    start: int
    ids: np.ndarray


@dataclass(frozen=True)
class RouteTable:
    """Routes of several samples, one after the other.

    ids: uint8 or uint16 `[rows, moe_layers, top_k]`, logical expert ids.
    valid: bool `[rows, moe_layers]`; the ids of an invalid row mean nothing.
    offsets: int64 `[samples + 1]`; sample i has the rows `offsets[i]:offsets[i + 1]`.
    layers: global layer number (from 0) of each MoE layer, ascending.
    token_sums: uint64 `[samples]`, `token_sum` of the tokens whose rows these are; None when who
    made the table was not told.
    """

    ids: np.ndarray
    valid: np.ndarray
    offsets: np.ndarray
    layers: tuple[int, ...]
    num_experts: int
    token_sums: np.ndarray | None = None

    @classmethod
    def build(
        cls,
        rows: Sequence[np.ndarray | Sequence[Segment] | None],
        num_rows: Sequence[int],
        layers: tuple[int, ...],
        num_experts: int,
        top_k: int,
    ) -> RouteTable:
        """From the segments of each sample, in the order of its requests.

        An array `[n, moe_layers, top_k]` stands for one segment from the first token on, None for
        none. `num_rows[i]` rows are expected of sample i; those that no segment has are invalid,
        and of those that several have the first counts. Raises ReplayError for rows beyond those
        expected, another shape, what is no integer, an id out of range or an expert named twice in
        a valid row.
        """
        dtype = np.uint8 if num_experts <= 256 else np.uint16
        offsets = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int64)
        ids = np.zeros((int(offsets[-1]), len(layers), top_k), dtype=dtype)
        valid = np.zeros(ids.shape[:2], dtype=bool)
        for i, given in enumerate(rows):
            segments = [Segment(0, given)] if isinstance(given, np.ndarray) else given or ()
            for segment in segments:
                array, start = segment.ids, segment.start
                if array.shape[1:] != ids.shape[1:] or not 0 <= start <= num_rows[i] - len(array):
                    raise ReplayError(
                        f"sample {i}: routes of shape {array.shape} from token {start} on, "
                        f"expected at most ({num_rows[i]}, {len(layers)}, {top_k}) in all"
                    )
                if array.dtype.kind not in "iu":
                    raise ReplayError(
                        f"sample {i}: routes are {array.dtype}, and experts have integers for names"
                    )
                if array.dtype != dtype:  # -1 or 256 would become another expert
                    _check_range(array, num_experts, i, start)
                span = slice(int(offsets[i]) + start, int(offsets[i]) + start + len(array))
                if valid[span].any():
                    fresh = np.flatnonzero(~valid[span, 0])
                    ids[span.start + fresh], valid[span.start + fresh] = array[fresh], True
                else:
                    ids[span], valid[span] = array, True
        table = cls(ids, valid, offsets, layers, num_experts)
        table.check()
        return table

    def check(self) -> None:
        """Raises ReplayError naming the first valid row that cannot be replayed."""
        bad = self.valid & _impossible(self.ids, self.num_experts)
        if bad.any():
            row, column = (int(x[0]) for x in np.nonzero(bad))
            raise ReplayError(
                f"routes of row {row}, layer {self.layers[column]} are "
                f"{self.ids[row, column].tolist()}: expected {self.ids.shape[-1]} different "
                f"experts below {self.num_experts}"
            )

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1

    @property
    def sums(self) -> np.ndarray:
        """`token_sums`, UNKNOWN where there are none."""
        if self.token_sums is None:
            return np.full(self.num_samples, UNKNOWN, np.uint64)
        return self.token_sums

    @property
    def coverage(self) -> float:
        """Share of (token, MoE layer) pairs that have recorded routes."""
        return float(self.valid.mean()) if self.valid.size else 1.0

    @classmethod
    def join_layers(cls, tables: Sequence[RouteTable]) -> RouteTable:
        """One table of all layers, from tables of the same samples; layers in order."""
        if len(tables) == 1:
            return tables[0]
        return replace(
            tables[0],
            ids=np.concatenate([t.ids for t in tables], axis=1),
            valid=np.concatenate([t.valid for t in tables], axis=1),
            layers=tuple(layer for t in tables for layer in t.layers),
        )

    @classmethod
    def concat(cls, tables: Sequence[RouteTable]) -> RouteTable:
        """One table of all samples, in order."""
        if len(tables) == 1:
            return tables[0]
        shifts = np.cumsum([0] + [len(t.ids) for t in tables])
        offsets = [t.offsets[:-1] + shift for t, shift in zip(tables, shifts, strict=False)]
        return cls(
            np.concatenate([t.ids for t in tables]),
            np.concatenate([t.valid for t in tables]),
            np.concatenate([*offsets, shifts[-1:]]),
            tables[0].layers,
            tables[0].num_experts,
            np.concatenate([t.sums for t in tables]),
        )


def token_sum(token_ids: Sequence[int] | np.ndarray) -> int:
    """What binds routes to the tokens that they were recorded of: xxh3-64 of these as int32, never
    UNKNOWN."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(token_ids, dtype="<i4")) or 1


def _impossible(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """bool `[rows, layers]`: an id out of range, or one twice. By pairs, a few rows at a time: ten
    times as fast as sorting, with the few experts a token that models have."""
    if not ids.size:  # a dense model
        return np.zeros(ids.shape[:2], dtype=bool)
    rows = ids.reshape(-1, ids.shape[-1])
    bad = np.empty(len(rows), dtype=bool)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        columns = np.ascontiguousarray(rows[start : start + _ROWS_AT_ONCE].T)
        found = (columns >= num_experts).any(axis=0)
        if len(columns) > _MOST_PAIRED:
            found |= (np.diff(np.sort(columns, axis=0), axis=0) == 0).any(axis=0)
        else:
            for one, other in combinations(columns, 2):
                found |= one == other
        bad[start : start + _ROWS_AT_ONCE] = found
    return bad.reshape(ids.shape[:2])


def _check_range(array: np.ndarray, num_experts: int, sample: int, start: int) -> None:
    bad = (array < 0) | (array >= num_experts)
    if bad.any():
        row, column, _ = (int(x[0]) for x in np.nonzero(bad))
        raise ReplayError(
            f"sample {sample}, token {start + row}: routes of MoE layer {column} are "
            f"{array[row, column].tolist()}; there are {num_experts} experts"
        )
