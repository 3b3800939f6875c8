"""Routes on their way from the engine that recorded them to the trainer ranks that replay them.

The maker packs its samples in blocks and cuts each by the trainer's pipeline pieces. It hands on
`SentRoutes`, which has counts and small parts. The large ones are results of the same call beside
it (`taken_apart`): whoever asked has references to them in Ray's object store (`put_together`), and
there they stay when the engine ends. A rank fetches the parts of its own layers that hold any of
its own samples:

    samples      0 1 2 3 4 │ 5 6 7 8 │ 9        a block: whole samples, up to BLOCK_BYTES of rows
    layers 0-3       *     │    *    │ *
    layers 4-7       *     │    *    │ *        *: one object

A sample of several turns is recorded by several requests, each of which hands on the rows that are
new (`router_replay/table.py`). `join` puts them one after the other, by reference:

    rows         0 1 2 3 │ 4 5 6 7 8 │ 9 10 11
    records         0    │     1     │    2       each from another request, another engine perhaps

A record may be the first rows of what was recorded (`head`), or rows that nobody has recorded
(`absent`). Both are made where parts are fetched: until then they are a few numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lora_moe_rl.errors import RoutesLost
from lora_moe_rl.kernels.route_codec import RowLayout
from lora_moe_rl.router_replay.made_parts import Absent, Head
from lora_moe_rl.router_replay.packed import PackedRoutes
from lora_moe_rl.router_replay.table import UNKNOWN, RouteTable

BLOCK_BYTES = 1 << 20
INLINE_BYTES = 1 << 14


@dataclass(frozen=True)
class Block:
    """Records first to stop - 1; `parts` are their packed bytes or references to them, one a
    pipeline piece."""

    first: int
    stop: int
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class SentRoutes:
    """Where the routes of some samples are, and which are missing.

    offsets: int64 `[records + 1]`; a record has the rows `offsets[i]:offsets[i + 1]`. turns: int64
    `[samples + 1]`; sample i is the records `turns[i]:turns[i + 1]`, None when each is one record.
    pieces: the MoE layers of each part of a block. missing: int64 `[layers]`, rows without routes.
    incomplete: int64, the rows that lack a layer; first_missing: the first of them and the layer
    that it lacks.
    """

    layers: tuple[int, ...]
    top_k: int
    num_experts: int
    offsets: np.ndarray
    pieces: tuple[tuple[int, ...], ...]
    blocks: tuple[Block, ...]
    missing: np.ndarray
    incomplete: np.ndarray
    first_missing: tuple[int, int] | None
    turns: np.ndarray | None = None

    @property
    def num_samples(self) -> int:
        return len(self.sample_offsets) - 1

    @property
    def sample_offsets(self) -> np.ndarray:
        """int64 `[samples + 1]`, as a table's offsets."""
        return self.offsets if self.turns is None else self.offsets[self.turns]

    def records(self, sample: int) -> range:
        """The records of a sample, in the order of its tokens."""
        if self.turns is None:
            return range(sample, sample + 1)
        return range(int(self.turns[sample]), int(self.turns[sample + 1]))

    @property
    def num_rows(self) -> int:
        return int(self.offsets[-1])

    def table(self) -> RouteTable:
        """All of it, fetched and unpacked. Raises ReplayError for corrupt parts."""
        whole = RouteTable.concat([_unpacked(block) for block in self.blocks])
        if self.turns is None:
            return whole
        return replace(whole, offsets=self.sample_offsets, token_sums=None)  # these are of records

    def of_sample(self, sample: int) -> RouteTable:
        """One sample's, from the blocks that hold any of it. Raises as `table` does."""
        records, tables = self.records(sample), []
        for block in self.blocks:
            first, stop = max(records.start, block.first), min(records.stop, block.stop)
            if first < stop:
                whole = _unpacked(block)
                begin, end = whole.offsets[[first - block.first, stop - block.first]]
                own = {"ids": whole.ids[begin:end], "valid": whole.valid[begin:end]}
                here = np.array([0, end - begin])
                tables.append(replace(whole, **own, offsets=here, token_sums=None))
        found = RouteTable.concat(tables)
        return replace(found, offsets=found.offsets[[0, -1]], token_sums=None)


def _unpacked(block: Block) -> RouteTable:
    parts = [PackedRoutes.from_bytes(part).unpack() for part in fetch(block.parts)]
    return RouteTable.join_layers(parts)


def join(samples: Sequence[Sequence[SentRoutes]]) -> SentRoutes:
    """The routes of several samples, each from what its requests recorded in turn. Nothing is
    fetched. Raises ValueError for a part that is not one record, or of another model."""
    parts = [part for turns in samples for part in turns]
    first = parts[0]
    for part in parts:
        if len(part.offsets) != 2:
            raise ValueError(f"a turn's routes are of {len(part.offsets) - 1} records, not of one")
        if (part.layers, part.pieces) != (first.layers, first.pieces):
            raise ValueError(
                f"routes of layers {part.pieces} cannot follow those of {first.pieces}"
            )
    offsets = np.cumsum([0, *(part.num_rows for part in parts)])
    lacking = [
        (int(start) + part.first_missing[0], part.first_missing[1])
        for start, part in zip(offsets, parts, strict=False)
        if part.first_missing is not None
    ]
    return replace(
        first,
        offsets=offsets,
        blocks=tuple(Block(i, i + 1, b.parts) for i, part in enumerate(parts) for b in part.blocks),
        missing=np.sum([part.missing for part in parts], axis=0),
        incomplete=np.concatenate([part.incomplete + o for part, o in zip(parts, offsets)]),
        first_missing=lacking[0] if lacking else None,
        turns=np.cumsum([0, *(len(turns) for turns in samples)]),
    )


def head(sent: SentRoutes, num_rows: int, of: int = UNKNOWN, first: int = UNKNOWN) -> SentRoutes:
    """The first rows of one record, by reference. `of`, `first`: `token_sum` of all its tokens and
    of those of these rows, which who packed it had no reason to add. Raises ValueError for routes
    of several records, for more rows than there are, and where some of these rows lack a layer: how
    often each layer is missing among them is not known."""
    if len(sent.offsets) != 2 or not 0 <= num_rows <= sent.num_rows:
        raise ValueError(f"{num_rows} rows are not the first of records of {sent.offsets.tolist()}")
    if num_rows == sent.num_rows:
        return sent
    if len(sent.incomplete) and sent.incomplete[0] < num_rows:
        raise ValueError(
            f"row {sent.incomplete[0]} lacks a layer, and is among the first {num_rows}"
        )
    whole = absent(sent.pieces, sent.top_k, sent.num_experts, num_rows)
    cut = _with_parts(sent, lambda part: Head(part, num_rows, of, first))
    none = np.zeros(0, np.int64)
    return replace(
        cut, offsets=whole.offsets, missing=0 * whole.missing, incomplete=none, first_missing=None
    )


def absent(
    pieces: Sequence[tuple[int, ...]], top_k: int, num_experts: int, num_rows: int
) -> SentRoutes:
    """One record of which no row has routes. `pieces`: as for `send`."""
    pieces = tuple(tuple(piece) for piece in pieces if piece)
    layers = tuple(layer for piece in pieces for layer in piece)
    parts = tuple(Absent(piece, top_k, num_experts, num_rows) for piece in pieces)
    return SentRoutes(
        layers,
        top_k,
        num_experts,
        np.array([0, num_rows], dtype=np.int64),
        pieces,
        (Block(0, 1, parts),),
        np.full(len(layers), num_rows, dtype=np.int64),
        np.arange(num_rows, dtype=np.int64),
        (0, layers[0]) if num_rows else None,
    )


def send(
    table: RouteTable,
    pieces: Sequence[tuple[int, ...]] | None = None,
    put: Callable[[np.ndarray], Any] = lambda part: part,
    block_bytes: int = BLOCK_BYTES,
) -> SentRoutes:
    """Packs a table and puts its parts. `pieces`: the MoE layers of each pipeline piece, None for
    one of all; together they are the table's layers, in order."""
    pieces = (table.layers,) if pieces is None else tuple(tuple(piece) for piece in pieces if piece)
    if tuple(layer for piece in pieces for layer in piece) != table.layers:
        raise ValueError(f"pieces {pieces} are not the layers {table.layers}")
    blocks = []
    for first, stop in _spans(table, block_bytes):
        packed = PackedRoutes.pack(table, first, stop)
        parts = tuple(put(packed.cut(piece).to_bytes()) for piece in pieces)
        blocks.append(Block(first, stop, parts))
    incomplete = np.flatnonzero(~table.valid.all(axis=1))
    first_missing = None
    if len(incomplete):
        row = int(incomplete[0])
        first_missing = (row, table.layers[int(np.argmin(table.valid[row]))])
    return SentRoutes(
        table.layers,
        table.ids.shape[2],
        table.num_experts,
        table.offsets,
        pieces,
        tuple(blocks),
        (~table.valid).sum(axis=0),
        incomplete,
        first_missing,
    )


@dataclass(frozen=True)
class Beside:
    """A part that stands beside, in this place."""

    place: int


def taken_apart(sent: SentRoutes, places: int) -> tuple[SentRoutes, list[np.ndarray | None]]:
    """What is handed on with small parts in it, and `places` more for the large ones, None where
    there are none left. Raises ValueError for too few."""
    large: list[np.ndarray | None] = []

    def stand_in(part: np.ndarray) -> np.ndarray | Beside:
        if part.nbytes <= INLINE_BYTES:
            return part
        large.append(part)
        return Beside(len(large) - 1)

    apart = _with_parts(sent, stand_in)
    if len(large) > places:
        raise ValueError(f"{len(large)} parts of routes have no room in {places} places")
    return apart, large + [None] * (places - len(large))


def put_together(apart: SentRoutes, refs: Sequence[Any]) -> SentRoutes:
    """What was taken apart, with references to the parts that stand beside it."""
    return _with_parts(apart, lambda part: refs[part.place] if isinstance(part, Beside) else part)


def _with_parts(sent: SentRoutes, other: Callable[[Any], Any]) -> SentRoutes:
    blocks = [replace(block, parts=tuple(map(other, block.parts))) for block in sent.blocks]
    return replace(sent, blocks=tuple(blocks))


def fetch(parts: Sequence[Any]) -> list[np.ndarray]:
    """The bytes of parts: arrays, Ray's references to arrays, and what is made of these here.
    Raises RoutesLost when they are on a node that is gone."""
    wanted = [part.part if isinstance(part, Head) else part for part in parts]
    remote = [part for part in wanted if not isinstance(part, np.ndarray | Absent)]
    fetched = _from_ray(remote) if remote else {}
    found = []
    for part, array in zip(parts, wanted, strict=True):
        if isinstance(array, Absent):
            array = array.made()
        elif not isinstance(array, np.ndarray):
            array = fetched[array]
        found.append(part.made(array) if isinstance(part, Head) else array)
    return found


def _from_ray(refs: Sequence[Any]) -> dict[Any, np.ndarray]:
    import ray
    from ray.exceptions import ObjectLostError

    try:
        return dict(zip(refs, ray.get(list(refs)), strict=True))
    except ObjectLostError as error:
        raise RoutesLost(
            f"routes of this step's rollout are lost with the node that they were on "
            f"({type(error).__name__}); go on from the newest checkpoint with --resume"
        ) from error


def _spans(table: RouteTable, block_bytes: int) -> list[tuple[int, int]]:
    """Samples of each block: as many as fit, at least one."""
    if not table.layers:  # a dense model
        return []
    layout = RowLayout(len(table.layers), table.ids.shape[2], table.num_experts)
    rows = max(1, block_bytes // layout.row_bytes)
    spans, first = [], 0
    while first < table.num_samples:
        stop = int(np.searchsorted(table.offsets, table.offsets[first] + rows, side="right")) - 1
        stop = max(first + 1, stop)
        spans.append((first, stop))
        first = stop
    return spans
