"""What a merge does to each shard of a base checkpoint, from headers alone. Torch-free.

A base weight that an adapter changes, or that gets another dtype, is a `Matrix`; all other bytes
are copied as they are. A matrix may lie in several tensors (weight and scales), even in two shards;
a stack of experts `[E, out, in]` is E matrices. The places of all of them are known before a byte
is read, so that each shard is read and written from front to back, a few rows at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lora_moe_rl.export.merged_targets import TURNED, Part, StoredWeight
from lora_moe_rl.files.untrusted import DTYPES, Entry, SafeWeights

COPY_BYTES = 8 * 2**20
# Numbers of one step of a matrix: small enough for a core's cache, and to keep memory small.
STEP_NUMBERS = 2 * 2**20
FP8_ROWS = 128  # rows that share scales


@dataclass(frozen=True)
class Place:
    """Where rows lie: `start` is the byte of row 0 in its file, and a row of the tensor holds
    `row_bytes` for each `rows` rows of the matrix."""

    file: str
    start: int
    dtype: str
    row_bytes: int
    rows: int = 1

    def span(self, first: int, rows: int) -> tuple[int, int]:
        """(byte in the file, bytes) of these rows of the matrix."""
        begin, end = first // self.rows, -(-(first + rows) // self.rows)
        return self.start + begin * self.row_bytes, (end - begin) * self.row_bytes


@dataclass(frozen=True)
class Matrix:
    """One `[out, in]` matrix of the base. `source` and `target` are `{role: place}`, the roles
    `weight` and, of a quantised form, `scale`. `target` has the tensors of one shard alone."""

    name: str
    form: str
    shape: tuple[int, int]
    source: Mapping[str, Place]
    target: Mapping[str, Place]
    target_form: str
    parts: tuple[Part, ...]

    def steps(self) -> Iterator[MergeStep]:
        """Rows in order; a step lies in one part."""
        rows = max(STEP_NUMBERS // max(self.shape[1], 1), 1)
        if self.form == "fp8":
            rows = max(rows // FP8_ROWS, 1) * FP8_ROWS
        if self.form == TURNED:  # its rows are columns of what is written
            rows = self.shape[0]
        parts = self.parts or (None,)
        for part in parts:
            first = part.first_row if part else 0
            end = first + (part.rows if part else self.shape[0])
            for row in range(first, end, rows):
                yield MergeStep(self, row, min(rows, end - row), part)


@dataclass(frozen=True)
class MergeStep:
    matrix: Matrix
    first: int
    rows: int
    part: Part | None

    def writes(self) -> list[tuple[int, int]]:
        """(byte in the shard, bytes) in the order of the matrix's targets."""
        return [place.span(self.first, self.rows) for place in self.matrix.target.values()]


@dataclass(frozen=True)
class CopyStep:
    file: str
    start: int
    target: int
    length: int

    def writes(self) -> list[tuple[int, int]]:
        return [(self.target, self.length)]


@dataclass(frozen=True)
class ShardPlan:
    """One output file: its tensors in order, and what fills them."""

    name: str
    header: bytes
    entries: tuple[Entry, ...]
    copies: tuple[tuple[Entry, Entry], ...]  # (of the base, of the output)
    matrices: tuple[Matrix, ...]

    @cached_property
    def nbytes(self) -> int:
        return self.entries[-1].end if self.entries else len(self.header)

    def steps(self) -> Iterator[MergeStep | CopyStep]:
        """What is to be done, in the order of the bytes of the output."""
        tasks: list[tuple[int, Matrix | tuple[Entry, Entry]]] = []
        tasks += [(target.start, (source, target)) for source, target in self.copies]
        tasks += [(min(p.start for p in m.target.values()), m) for m in self.matrices]
        for _, task in sorted(tasks, key=lambda pair: pair[0]):
            if isinstance(task, Matrix):
                yield from task.steps()
            else:
                source, target = task
                for done in range(0, source.nbytes, COPY_BYTES):
                    length = min(COPY_BYTES, source.nbytes - done)
                    yield CopyStep(self.name, source.start + done, target.start + done, length)


def plan_shards(
    base: SafeWeights, stored: Mapping[str, StoredWeight], dtype: str | None
) -> list[ShardPlan]:
    """`stored`: the weights that adapters change (`merged_targets.find`). `dtype`: what the float
    tensors of the checkpoint's main dtype and all quantised ones become (`BF16`), or None."""
    owner = {tensor: weight for weight in stored.values() for tensor in weight.tensors.values()}
    return [_plan_shard(base, name, owner, dtype) for name in base.files]


def plan_renamed(base: SafeWeights, names: Mapping[str, Sequence[str]]) -> list[ShardPlan]:
    """Of the tensors that `names` has, as they are and under the names that it gives each; a file
    with none of them is left out."""
    shards = []
    for file, source in base.files.items():
        outputs = [
            (entry, name, entry.dtype, entry.shape)
            for entry in source.entries.values()
            for name in names.get(entry.name, ())
        ]
        if outputs:
            header, placed = _lay_out(outputs, source.metadata or {"format": "pt"})
            copies = tuple((entry, put) for (entry, *_), put in zip(outputs, placed, strict=True))
            shards.append(ShardPlan(file, header, tuple(placed), copies, ()))
    return shards


def _plan_shard(
    base: SafeWeights, name: str, owner: Mapping[str, StoredWeight], dtype: str | None
) -> ShardPlan:
    file = base.files[name]
    outputs: list[tuple[Entry, str, str, tuple[int, ...]]] = []  # (base, name, dtype, shape)
    for entry in file.entries.values():
        weight = owner.get(entry.name)
        if weight is None:
            outputs.append((entry, entry.name, entry.dtype, entry.shape))
        elif dtype is None or weight.form == "float":
            new = entry.dtype if dtype is None else dtype
            outputs.append((entry, entry.name, new, entry.shape))
        elif weight.role_of(entry.name) == "weight":
            outputs.append((entry, weight.name, dtype, weight.as_numbers))
    if dtype is not None:  # tensors stay aligned
        outputs.sort(key=lambda output: -DTYPES[output[2]][0])
    metadata = file.metadata or {"format": "pt"}
    header, placed = _lay_out(outputs, metadata)
    copies, by_weight = [], {}
    for (source, *_), target in zip(outputs, placed, strict=True):
        weight = owner.get(source.name)
        role = weight.role_of(source.name) if weight else None
        if weight is None or role == "shape":
            copies.append((source, target))
        else:
            by_weight.setdefault(weight.name, (weight, {}))[1][role] = target
    matrices = [
        matrix
        for weight, targets in by_weight.values()
        for matrix in _matrices(base, weight, targets, name, dtype)
    ]
    return ShardPlan(name, header, tuple(placed), tuple(copies), tuple(matrices))


def _lay_out(
    outputs: list[tuple[Entry, str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[Entry]]:
    """(first bytes of the file, its tensors one after another)."""
    placed, start = [], 0
    for _, name, dtype, shape in outputs:
        end = start + math.prod(shape) * DTYPES[dtype][0]
        placed.append(Entry(name, dtype, shape, start, end))
        start = end
    fields: dict[str, object] = {"__metadata__": dict(metadata)}
    for one in placed:
        offsets = [one.start, one.end]
        fields[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    first = len(header)
    return header, [replace(one, start=first + one.start, end=first + one.end) for one in placed]


def _matrices(
    base: SafeWeights,
    weight: StoredWeight,
    targets: Mapping[str, Entry],
    file: str,
    dtype: str | None,
) -> Iterator[Matrix]:
    """One matrix, or one for each expert of a stack."""
    *stack, out, in_features = weight.shape
    experts = stack[0] if stack else 1

    def place(role: str, where: str, entry: Entry, expert: int) -> Place:
        rows = FP8_ROWS if role == "scale" and weight.form == "fp8" else 1
        nbytes = entry.nbytes // experts
        row_bytes = nbytes // max(-(-out // rows), 1)
        return Place(where, entry.start + expert * nbytes, entry.dtype, row_bytes, rows)

    sources = {
        role: (base.file_of[tensor].path.name, base.entry(tensor))
        for role, tensor in weight.tensors.items()
        if role != "shape"
    }
    for expert in range(experts):
        yield Matrix(
            f"{weight.name}[{expert}]" if stack else weight.name,
            weight.form,
            (out, in_features),
            {role: place(role, where, entry, expert) for role, (where, entry) in sources.items()},
            {role: place(role, file, entry, expert) for role, entry in targets.items()},
            weight.form if dtype is None else "float",
            weight.parts[expert] if weight.parts else (),
        )
