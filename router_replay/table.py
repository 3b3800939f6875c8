"""The route table: which experts each token of each sample was sent to.

One row a token that was fed to the model. A sample of L tokens (prompt and response) has L - 1
rows: row i holds the experts of the forward of token i, which predicts token i + 1; the last
sampled token is never fed, so it has none:

    token     p0   p1   p2   r0   r1   r2=end
    row        0    1    2    3    4    -
    predicts  p1   p2   r0   r1   r2

Columns are indexed by global layer number through `layers`; dense layers have no column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lora_moe_rl.errors import ReplayError


@dataclass(frozen=True)
class RouteTable:
    """Routes of several samples, one after the other.

    ids: uint8 or uint16 `[rows, moe_layers, top_k]`, logical expert ids.
    valid: bool `[rows, moe_layers]`; the ids of an invalid row mean nothing.
    offsets: int64 `[samples + 1]`; sample i has the rows `offsets[i]:offsets[i + 1]`.
    layers: global layer number (from 0) of each MoE layer, ascending.
    """

    ids: np.ndarray
    valid: np.ndarray
    offsets: np.ndarray
    layers: tuple[int, ...]
    num_experts: int

    @classmethod
    def build(
        cls,
        rows: Sequence[np.ndarray | None],
        num_rows: Sequence[int],
        layers: tuple[int, ...],
        num_experts: int,
        top_k: int,
    ) -> RouteTable:
        """From one array `[n, moe_layers, top_k]` a sample.

        `num_rows[i]` rows are expected of sample i. None, or fewer rows than expected, leaves the
        rest invalid: rows are recorded from the first token on. Raises ReplayError for more rows
        than expected, another shape, an id out of range or an expert named twice in a valid row.
        """
        dtype = np.uint8 if num_experts <= 256 else np.uint16
        offsets = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int64)
        ids = np.zeros((int(offsets[-1]), len(layers), top_k), dtype=dtype)
        valid = np.zeros(ids.shape[:2], dtype=bool)
        for i, array in enumerate(rows):
            if array is None:
                continue
            if array.shape[1:] != ids.shape[1:] or len(array) > num_rows[i]:
                raise ReplayError(
                    f"sample {i}: routes of shape {array.shape}, expected at most "
                    f"({num_rows[i]}, {len(layers)}, {top_k})"
                )
            ids[offsets[i] : offsets[i] + len(array)] = array
            valid[offsets[i] : offsets[i] + len(array)] = True
        table = cls(ids, valid, offsets, layers, num_experts)
        table.check()
        return table

    def check(self) -> None:
        """Raises ReplayError naming the first valid row that cannot be replayed."""
        bad = self.ids.max(axis=-1) >= self.num_experts
        ordered = np.sort(self.ids, axis=-1)
        bad |= (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
        bad &= self.valid
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
    def coverage(self) -> float:
        """Share of (token, MoE layer) pairs that have recorded routes."""
        return float(self.valid.mean()) if self.valid.size else 1.0

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
        )
