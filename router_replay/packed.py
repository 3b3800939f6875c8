"""Routes as they travel: packed rows behind a header that says what they are, with checksums.

    magic, version, flags     4 + 2 + 2 bytes
    counts                    layers, top_k, experts, samples, as uint32
    layers                    uint32 each: global layer numbers, ascending
    offsets                   uint64 [samples + 1]: sample i has the rows offsets[i]:offsets[i + 1]
    checksums                 uint64 each: xxh3-64 of a sample's rows and validity bits
    token sums                uint64 each: xxh3-64 of the tokens that its rows are of; 0: not told
    checksum of all above     uint64
    rows                      uint8 [rows, row_bytes], as in kernels/route_codec/layout.py
    validity                  uint8 [rows, ceil(layers / 8)], absent when every row is valid

All numbers are little-endian. Layers are cut out of a row, and samples out of the rows, without
unpacking them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from lora_moe_rl.errors import ReplayError
from lora_moe_rl.kernels.route_codec import RowLayout, cut_array, pack_array, unpack_array
from lora_moe_rl.router_replay.table import UNKNOWN, RouteTable

MAGIC, VERSION = b"LMRR", 2
_START = struct.Struct("<4sHHIIII")
_HAS_VALIDITY = 1


@dataclass(frozen=True)
class PackedRoutes:
    """Routes of some samples, one after the other, for some consecutive MoE layers.

    rows: uint8 `[rows, row_bytes]`. valid: uint8 `[rows, ceil(layers / 8)]`, bit l % 8 of byte
    l // 8 for layer l; None when all are valid. offsets: int64 `[samples + 1]`. checksums: uint64
    `[samples]`. token_sums: as a table has them.
    """

    layers: tuple[int, ...]
    layout: RowLayout
    offsets: np.ndarray
    rows: np.ndarray
    valid: np.ndarray | None
    checksums: np.ndarray
    token_sums: np.ndarray

    @classmethod
    def pack(cls, table: RouteTable, start: int = 0, stop: int | None = None) -> PackedRoutes:
        """Samples start to stop - 1 of a table."""
        stop = table.num_samples if stop is None else stop
        offsets = table.offsets[start : stop + 1]
        span = slice(int(offsets[0]), int(offsets[-1]))
        layout = RowLayout(len(table.layers), table.ids.shape[2], table.num_experts)
        valid = table.valid[span]
        return cls._of(
            table.layers,
            layout,
            offsets - offsets[0],
            pack_array(table.ids[span], layout),
            None if valid.all() else np.packbits(valid, axis=1, bitorder="little"),
            table.sums[start:stop].astype("<u8"),
        )

    @classmethod
    def _of(cls, layers, layout, offsets, rows, valid, token_sums) -> PackedRoutes:
        sums = [_checksum(rows, valid, *span) for span in pairwise(offsets)]
        return cls(layers, layout, offsets, rows, valid, np.array(sums, "<u8"), token_sums)

    def cut(self, layers: Sequence[int]) -> PackedRoutes:
        """The same samples with only these consecutive layers.

        Raises ReplayError when they are not among this one's layers, one after the other.
        """
        layers = tuple(layers)
        if layers == self.layers:
            return self
        first = self.layers.index(layers[0]) if layers[0] in self.layers else 0
        if self.layers[first : first + len(layers)] != layers:
            raise ReplayError(f"routes of layers {self.layers} hold no run of layers {layers}")
        valid = self.valid
        if valid is not None:
            bits = np.unpackbits(valid, axis=1, count=len(self.layers), bitorder="little")
            valid = np.packbits(bits[:, first : first + len(layers)], axis=1, bitorder="little")
        layout = RowLayout(len(layers), self.layout.top_k, self.layout.num_experts)
        rows = cut_array(self.rows, self.layout, first, len(layers))
        return PackedRoutes._of(layers, layout, self.offsets, rows, valid, self.token_sums)

    def head(self, num_rows: int, of: int = UNKNOWN, first: int = UNKNOWN) -> PackedRoutes:
        """The first rows of the first sample. `of`, `first`: the sums of its tokens and of those of
        these rows. Raises ReplayError when it has fewer, is corrupt, or is of other tokens."""
        self.check(0, "routes that are cut")
        self.check_tokens(0, of, "routes that are cut")
        if not 0 <= num_rows <= self.offsets[1]:
            raise ReplayError(f"{num_rows} rows cannot be cut from routes of {self.offsets[1]}")
        valid = None if self.valid is None else self.valid[:num_rows]
        offsets = np.array([0, num_rows], dtype=np.int64)
        sums = np.array([first], "<u8")
        return PackedRoutes._of(
            self.layers, self.layout, offsets, self.rows[:num_rows], valid, sums
        )

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1

    def check(self, sample: int, where: str) -> None:
        """Raises ReplayError, naming the sample, unless its bytes are those that were packed."""
        found = _checksum(self.rows, self.valid, *self.offsets[sample : sample + 2])
        if found != int(self.checksums[sample]):
            raise ReplayError(
                f"{where}: routes of layers {self.layers[0]} to {self.layers[-1]} are corrupt: "
                f"their xxh3-64 is {found:016x}, packed with {int(self.checksums[sample]):016x}"
            )

    def check_tokens(self, sample: int, found: int, where: str) -> None:
        """Raises ReplayError, naming the sample, where its routes were recorded of other tokens
        than those of this sum. Where either is UNKNOWN nothing can be said."""
        recorded = int(self.token_sums[sample])
        if UNKNOWN not in (recorded, found) and recorded != found:
            raise ReplayError(
                f"{where}: its routes are those of other tokens, whose xxh3-64 is {recorded:016x}; "
                f"that of its own is {found:016x}: routes and samples were exchanged on their way"
            )

    def to_bytes(self) -> np.ndarray:
        """uint8: the header, rows and validity."""
        flags = 0 if self.valid is None else _HAS_VALIDITY
        counts = (len(self.layers), self.layout.top_k, self.layout.num_experts, self.num_samples)
        head = b"".join(
            [
                _START.pack(MAGIC, VERSION, flags, *counts),
                np.asarray(self.layers, dtype="<u4").tobytes(),
                self.offsets.astype("<u8").tobytes(),
                self.checksums.tobytes(),
                self.token_sums.tobytes(),
            ]
        )
        head += struct.pack("<Q", xxhash.xxh3_64_intdigest(head))
        valid = b"" if self.valid is None else self.valid
        parts = [np.frombuffer(part, dtype=np.uint8) for part in (head, valid)]
        return np.concatenate([parts[0], self.rows.reshape(-1), parts[1].reshape(-1)])

    @classmethod
    def from_bytes(cls, data: np.ndarray) -> PackedRoutes:
        """Views into `data`, uint8. Checks the header, not the rows: see `check`.

        Raises ReplayError for anything that `to_bytes` did not write.
        """
        data = np.ascontiguousarray(data)
        if len(data) < _START.size:
            raise ReplayError(f"packed routes have {len(data)} bytes, less than a header")
        magic, version, flags, *counts = _START.unpack(data[: _START.size].tobytes())
        if magic != MAGIC or version != VERSION:
            raise ReplayError(
                f"packed routes begin with {magic!r}, version {version}; this is version {VERSION} "
                f"of {MAGIC!r}"
            )
        num_layers, top_k, num_experts, num_samples = counts
        each = 8 * num_samples
        ends = np.cumsum([_START.size, 4 * num_layers, each + 8, each, each, 8])
        head = data[: ends[4]].tobytes()
        found = data[ends[4] : ends[5]].tobytes()
        if struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) != found:
            raise ReplayError("the header of packed routes is corrupt: its xxh3-64 differs")
        layers = tuple(np.frombuffer(head, "<u4", num_layers, ends[0]).tolist())
        offsets = np.frombuffer(head, "<u8", num_samples + 1, ends[1]).astype(np.int64)
        checksums = np.frombuffer(head, "<u8", num_samples, ends[2])
        token_sums = np.frombuffer(head, "<u8", num_samples, ends[3])
        layout = _layout(num_layers, top_k, num_experts)
        if flags & ~_HAS_VALIDITY or any(a >= b for a, b in pairwise(layers)):
            raise ReplayError(
                f"packed routes have flags {flags} and layers {layers[:8]}: no other flag than "
                f"{_HAS_VALIDITY} is known, and layers ascend"
            )
        if offsets[0] or (np.diff(offsets) < 0).any():
            raise ReplayError(
                f"packed routes have samples at rows {offsets[:8].tolist()}: they begin at 0, and "
                "none ends before it begins"
            )
        num_rows = int(offsets[-1])
        width = -(-num_layers // 8) if flags & _HAS_VALIDITY else 0
        body = data[ends[5] :]
        if len(body) != num_rows * (layout.row_bytes + width):
            raise ReplayError(
                f"packed routes of {num_rows} rows have {len(body)} bytes of them, expected "
                f"{num_rows * (layout.row_bytes + width)}"
            )
        middle = num_rows * layout.row_bytes
        rows = body[:middle].reshape(num_rows, layout.row_bytes)
        valid = body[middle:].reshape(num_rows, width) if width else None
        return cls(layers, layout, offsets, rows, valid, checksums, token_sums)

    def unpack(self, where: str = "packed routes") -> RouteTable:
        """All of it. Raises ReplayError for a corrupt sample and for routes that are impossible."""
        for sample in range(self.num_samples):
            self.check(sample, f"{where}, sample {sample}")
        table = RouteTable(
            unpack_array(self.rows, self.layout),
            valid_rows(self.valid, len(self.rows), len(self.layers)),
            self.offsets,
            self.layers,
            self.layout.num_experts,
            self.token_sums,
        )
        table.check()
        return table


def _layout(num_layers: int, top_k: int, num_experts: int) -> RowLayout:
    """Raises ReplayError for counts that no router has."""
    try:
        if top_k > num_experts:
            raise ValueError(f"{top_k} experts a token of {num_experts}")
        return RowLayout(num_layers, top_k, num_experts)
    except ValueError as error:
        raise ReplayError(f"the header of packed routes has impossible counts: {error}") from error


def valid_rows(bits: np.ndarray | None, num_rows: int, num_layers: int) -> np.ndarray:
    """bool `[rows, layers]` of validity bits."""
    if bits is None:
        return np.ones((num_rows, num_layers), dtype=bool)
    return np.unpackbits(bits, axis=1, count=num_layers, bitorder="little").astype(bool)


def _checksum(rows: np.ndarray, valid: np.ndarray | None, start, stop) -> int:
    digest = xxhash.xxh3_64(np.ascontiguousarray(rows[start:stop]))
    if valid is not None:
        digest.update(np.ascontiguousarray(valid[start:stop]))
    return digest.intdigest()
