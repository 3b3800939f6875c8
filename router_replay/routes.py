"""A rank's routes: fetched for its samples and its pipeline chunks, cut to its micro-batches.

They stay packed until a micro-batch's forward (`router_replay/replay.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap

import numpy as np
from megatron.core import parallel_state as ps

from lora_moe_rl.adapters.spec import ModelShape
from lora_moe_rl.data.packing import MicroBatch
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.kernels.route_codec import RowLayout, pack_array
from lora_moe_rl.router_replay.packed import PackedRoutes, valid_rows
from lora_moe_rl.router_replay.replay import MicroRoutes
from lora_moe_rl.router_replay.table import UNKNOWN, RouteTable, token_sum
from lora_moe_rl.router_replay.travel import SentRoutes, fetch, send

Sent = SentRoutes | RouteTable
Fed = Callable[[int], np.ndarray]  # the tokens fed of a sample, one a row


class Routes:
    """The routes of one step: all about them, and the packed rows of this rank's share.

    `parts`: of each engine in turn, sent or as tables, which then are packed here. `chunks`: global
    numbers of the MoE layers of each of this rank's pipeline chunks.
    """

    def __init__(self, parts: Sequence[Sent], chunks: Sequence[tuple[int, ...]]):
        self.parts = [send(p) if isinstance(p, RouteTable) else p for p in parts]
        self.chunks = chunks
        self.num_samples = sum(part.num_samples for part in self.parts)
        self.num_rows = sum(part.num_rows for part in self.parts)
        self.layers = self.parts[0].layers
        self.missing = np.sum([part.missing for part in self.parts], axis=0)
        self._first = np.cumsum([0] + [part.num_samples for part in self.parts]).tolist()
        starts = np.cumsum([0] + [part.num_rows for part in self.parts])
        rows = [part.incomplete + start for part, start in zip(self.parts, starts)]
        self.incomplete = np.concatenate(rows)
        self.bytes = 0
        self._blocks: dict[tuple[int, int, int], PackedRoutes] = {}  # by part, block and piece
        # By chunk and sample: for each of its turns a block's routes, and its number in the block.
        self._received: dict[tuple[int, int], list[tuple[PackedRoutes, int]]] = {}
        self._packed: dict[tuple[int, int], list[tuple[PackedRoutes, int]]] = {}

    @property
    def coverage(self) -> float:
        """Share of (token, MoE layer) pairs that have recorded routes."""
        pairs = self.num_rows * len(self.layers)
        return 1.0 - float(self.missing.sum()) / pairs if pairs else 1.0

    def check_model(self, shape: ModelShape) -> None:
        """Raises ReplayError for routes of another model."""
        expected = (shape.moe_layers, shape.top_k, shape.num_experts)
        for part in self.parts:
            if (found := (part.layers, part.top_k, part.num_experts)) != expected:
                raise ReplayError(
                    f"routes are of (layers, experts a token, experts) {found}; the model has "
                    f"{expected}"
                )

    def check_samples(self, lengths: np.ndarray) -> None:
        """Raises ReplayError unless there is a row for every token fed of every sample."""
        found = np.concatenate([np.diff(part.sample_offsets) for part in self.parts])
        if len(found) != len(lengths) or (found != lengths).any():
            raise ReplayError(
                f"there are routes of {len(found)} samples and {self.num_rows} tokens; the batch "
                f"has {len(lengths)} samples and {int(lengths.sum())} tokens to feed"
            )

    def check_missing(self, missing: str) -> None:
        """Raises ReplayError for missing routes under replay.missing=error."""
        if missing != "error":
            return
        first = 0
        for part in self.parts:
            if part.first_missing is not None:
                row, layer = part.first_missing
                starts = part.sample_offsets
                sample = int(np.searchsorted(starts, row, side="right")) - 1
                raise ReplayError(
                    f"sample {first + sample} has no routes for token "
                    f"{row - int(starts[sample])}, layer {layer} "
                    f"({1 - self.coverage:.2%} missing); set replay.missing=mask or route to go on "
                    f"without them"
                )
            first += part.num_samples

    def fetch(self, samples: Iterable[int], fed: Fed | None = None) -> None:
        """Brings the routes of the samples in this rank's layers here, checks their bytes, and that
        they are of the tokens that are fed of each; without `fed` these are not known."""
        wanted = {sample: self._places(sample) for sample in samples}
        chunks = [chunk for chunk, layers in enumerate(self.chunks) if layers]
        keys = {
            (part, block, chunk): (part, block, self._piece(part, chunk))
            for turns in wanted.values()
            for part, block, _ in turns
            for chunk in chunks
        }
        blocks = self._blocks
        places = sorted(set(keys.values()) - set(blocks))
        refs = [self.parts[part].blocks[block].parts[piece] for part, block, piece in places]
        for place, array in zip(places, fetch(refs), strict=True):
            self.bytes += array.nbytes
            blocks[place] = self._parsed(place, array)
        for sample, turns in wanted.items():
            sums = self._token_sums(turns, None if fed is None else fed(sample))
            for (part, block, local), found in zip(turns, sums, strict=True):
                for place in {keys[part, block, chunk] for chunk in chunks}:
                    blocks[place].check(local, f"sample {sample}")
                    blocks[place].check_tokens(local, found, f"sample {sample}")
        cut = {key: blocks[place].cut(self.chunks[key[2]]) for key, place in keys.items()}
        for sample, turns in wanted.items():
            for chunk in chunks:
                named = [((part, block, chunk), local) for part, block, local in turns]
                self._received[chunk, sample] = [(blocks[keys[key]], at) for key, at in named]
                self._packed[chunk, sample] = [(cut[key], at) for key, at in named]

    def _token_sums(
        self, turns: Sequence[tuple[int, int, int]], fed: np.ndarray | None
    ) -> list[int]:
        """Of each of a sample's turns, of the tokens fed that it has the rows of."""
        if fed is None:
            return [UNKNOWN] * len(turns)
        sums, start = [], 0
        for part, block, local in turns:
            record = self.parts[part].blocks[block].first + local
            stop = start + int(np.diff(self.parts[part].offsets[record : record + 2])[0])
            sums.append(token_sum(fed[start:stop]))
            start = stop
        return sums

    def _parsed(self, place: tuple[int, int, int], data: np.ndarray) -> PackedRoutes:
        packed = PackedRoutes.from_bytes(data)
        part = self.parts[place[0]]
        block, layers = part.blocks[place[1]], part.pieces[place[2]]
        layout = RowLayout(len(layers), part.top_k, part.num_experts)
        lengths = np.diff(part.offsets[block.first : block.stop + 1])
        if (packed.layers, packed.layout) != (layers, layout) or not np.array_equal(
            np.diff(packed.offsets), lengths
        ):
            raise ReplayError(
                f"a block that was sent as samples of {lengths.tolist()} tokens in {layout} of "
                f"layers {layers} holds samples of {np.diff(packed.offsets).tolist()} tokens in "
                f"{packed.layout} of layers {packed.layers}"
            )
        return packed

    def _places(self, sample: int) -> list[tuple[int, int, int]]:
        """Part, block, and number within the block, of each of the sample's turns."""
        if sample >= self.num_samples:
            raise ReplayError(f"there are routes of {self.num_samples} samples only")
        number = bisect_right(self._first, sample) - 1
        part, found = self.parts[number], []
        for record in part.records(sample - self._first[number]):
            block = bisect_right(part.blocks, record, key=lambda block: block.stop)
            found.append((number, block, record - part.blocks[block].first))
        return found

    def _piece(self, part: int, chunk: int) -> int:
        """The pipeline piece that holds a chunk's layers."""
        pieces = self.parts[part].pieces
        for i, piece in enumerate(pieces):
            if set(self.chunks[chunk]) <= set(piece):
                return i
        raise ReplayError(
            f"routes were sent in pieces of layers {pieces}; this rank needs layers "
            f"{self.chunks[chunk]} in one: they were cut for another pipeline layout"
        )

    def received(self, chunk: int, sample: int) -> list[tuple[PackedRoutes, slice]]:
        """Of each of the sample's turns, the packed rows that hold its routes, as they came, and
        which of them are its."""
        return list(starmap(_of_record, self._received[chunk, sample]))

    def micro(self, data: MicroBatch) -> list[MicroRoutes | None]:
        """Of each chunk, the rows of this rank's tokens of a micro-batch."""
        return [self._micro(chunk, data) if self.chunks[chunk] else None
                for chunk in range(len(self.chunks))]  # fmt: skip

    def _micro(self, chunk: int, data: MicroBatch) -> MicroRoutes:
        layers, first = self.chunks[chunk], self.parts[0]
        layout = RowLayout(len(layers), first.top_k, first.num_experts)
        mine = data.fed[sequence_shard(len(data.fed))]
        pieces, bits = [], []
        for k, sample in enumerate(data.samples):
            start = int(data.starts[k])
            for packed, span in starmap(_of_record, self._packed[chunk, sample]):
                stop = start + span.stop - span.start
                here = _chosen(mine, start, stop, span.start)
                pieces.append(packed.rows[here])
                bits.append(None if packed.valid is None else packed.valid[here])
                start = stop
        if padding := len(mine) - sum(map(len, pieces)):
            pieces.append(_spread(padding, layout))
            bits.append(None)
        valid = None
        if any(of_one is not None for of_one in bits):
            every = zip(bits, map(len, pieces), strict=True)
            valid = np.concatenate([valid_rows(b, n, layout.num_layers) for b, n in every])
            if valid.all():  # the bits are of all samples that came together
                valid = None
        return MicroRoutes(
            layers,
            layout,
            tuple(pieces),
            mine < data.starts[-1],  # the rest is padding
            valid,
        )

    def complete(self, data: MicroBatch) -> np.ndarray:
        """bool `[T]`: tokens of a micro-batch that have routes in all layers of the model."""
        if not len(self.incomplete):
            return data.counted
        there = np.append(self.incomplete, -1)[np.searchsorted(self.incomplete, data.rows)]
        return (there != data.rows) & (data.rows >= 0)


def _of_record(packed: PackedRoutes, local: int) -> tuple[PackedRoutes, slice]:
    return packed, slice(int(packed.offsets[local]), int(packed.offsets[local + 1]))


def _chosen(mine: np.ndarray, start: int, stop: int, row: int) -> slice | np.ndarray:
    """Which packed rows are of tokens start to stop - 1 that are among `mine`, ascending; the row
    of the first is `row`. A slice where they are one after the other, which needs no copy."""
    first, last = np.searchsorted(mine, [start, stop]).tolist()
    among = mine[first:last]
    if len(among) and among[-1] - among[0] == len(among) - 1:
        begin = int(among[0]) - start + row
        return slice(begin, begin + len(among))
    return among - start + row


def _spread(num_tokens: int, layout: RowLayout) -> np.ndarray:
    """Packed rows for padding: all experts equally often, so that no rank waits for it."""
    first = np.arange(num_tokens)[:, None, None] * layout.top_k
    ids = (first + np.arange(layout.top_k)) % layout.num_experts
    return pack_array(np.repeat(ids, layout.num_layers, axis=1), layout)


def sequence_shard(length: int) -> slice:
    """Which of so many tokens a router of this rank sees: under sequence parallelism one of tp
    equal slices of those that the context-parallel rank has."""
    mine = context_shard(length)
    tp, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    return _part(mine.stop - mine.start, rank, tp, mine.start)


def context_shard(length: int) -> slice:
    """Which of so many tokens this rank is fed: one of cp equal slices."""
    return _part(length, ps.get_context_parallel_rank(), ps.get_context_parallel_world_size())


def _part(length: int, rank: int, ranks: int, first: int = 0) -> slice:
    return slice(first + rank * length // ranks, first + (rank + 1) * length // ranks)
