"""What a trainer rank sends of an adapter version: boxes of canonical tensors in one buffer.

A rank's part has the same layout for all versions: it is computed once from the plan, and both ends
know it. Of a version travel only the buffer and one checksum a box. The scale is folded into B.
"""

from __future__ import annotations

import json
import mmap
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import psutil
import xxhash

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.plan import Box, EngineLayout, Plan, lacking, wanted
from lora_moe_rl.rollout.facts import Dtype, Matrix, served_slices

if TYPE_CHECKING:
    import torch

    # Of a part, uint8 `[nbytes]`: on the host, or on a device.
    Memory = np.ndarray | torch.Tensor

# numpy has no bfloat16: its bits travel as uint16.
STORAGE = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(np.uint16)}
INFINITY = {"float32": np.uint32(0x7F800000), "bfloat16": np.uint16(0x7F80)}  # their bits
SIGN = {"float32": np.uint32(1 << 31), "bfloat16": np.uint16(1 << 15)}
ALIGNMENT = 64  # bytes; a cache line, and more than any vector load asks for


@dataclass(frozen=True)
class Entry:
    """One box of a part: of which tensor, for which slot of vLLM (its module and the parts of it
    that hold the box), for which engine ranks, and at which byte of the buffer."""

    site: str
    matrix: Matrix
    module: str
    slices: tuple[int, ...]
    box: Box
    targets: tuple[int, ...]
    offset: int

    @property
    def tensor(self) -> str:
        return f"{self.site}.{self.matrix}"

    def nbytes(self, dtype: Dtype) -> int:
        return self.box.size * STORAGE[dtype].itemsize

    def view(self, whole: torch.Tensor) -> torch.Tensor:
        """The box in a buffer that is seen in its dtype."""
        start = self.offset // whole.itemsize
        return whole[start : start + self.box.size].view(self.box.shape)

    def bytes_of(self, buffer: np.ndarray, dtype: Dtype) -> np.ndarray:
        """The box in a buffer of bytes."""
        return buffer[self.span(dtype)]

    def span(self, dtype: Dtype) -> slice:
        """Its bytes in the buffer."""
        return slice(self.offset, self.offset + self.nbytes(dtype))


@dataclass(frozen=True)
class PartLayout:
    """Where everything lies that trainer rank `source` sends."""

    source: int
    dtype: Dtype
    nbytes: int
    entries: tuple[Entry, ...]

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """Where the boxes for engine rank `rank` lie: (first byte, last + 1), of boxes without
        others between them in one."""
        return self._runs.get(rank, [])

    @cached_property
    def _runs(self) -> dict[int, list[tuple[int, int]]]:
        ends = [entry.offset for entry in self.entries[1:]] + [self.nbytes]
        by_rank: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for entry, end in zip(self.entries, ends, strict=True):
            for found in (by_rank[rank] for rank in entry.targets):
                start = found.pop()[0] if found and found[-1][1] == entry.offset else entry.offset
                found.append((start, end))
        return dict(by_rank)


@dataclass(frozen=True)
class SentPart:
    """A part of one version, ready to be read: `path` tells an engine worker where,
    as its transport needs it; `checksums` are of the boxes, in the order of the layout: xxh3-64,
    or of a part on a device what `refit/on_device.py` makes of it."""

    source: int
    version: int
    path: str
    nbytes: int
    checksums: tuple[int, ...]


def part_layouts(plan: Plan, spec: AdapterSpec, dtype: Dtype) -> list[PartLayout]:
    """One for each trainer rank that sends anything. A box that several engine ranks take from the
    same trainer rank lies there once; those for one engine rank lie together as far as can be."""
    boxes: dict[int, dict[tuple[str, Matrix, Box], list[int]]] = {}
    for t in plan.transfers:
        mine = boxes.setdefault(t.source, {})
        mine.setdefault((t.site.name, t.matrix, t.box), []).append(t.target)
    return [_lay_out(source, mine, spec, dtype) for source, mine in sorted(boxes.items())]


def check_complete(layouts: Sequence[PartLayout], spec: AdapterSpec, engine: EngineLayout) -> None:
    """Raises RefitError unless the parts together bring every engine rank all that it holds, once
    and nothing else: what never arrives, or is of another rank, no other check would miss."""
    boxes: dict[tuple[str, int], list[Box]] = defaultdict(list)
    for layout in layouts:
        for entry in layout.entries:
            for target in entry.targets:
                boxes[entry.tensor, target].append(entry.box)
    counts = {key: sum(box.size for box in mine) for key, mine in boxes.items()}
    if faults := lacking(counts, spec, engine) or _misplaced(boxes, spec, engine):
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise RefitError(f"the parts of a refit are not all of the adapter: {faults[0]}{more}")


def _misplaced(
    boxes: Mapping[tuple[str, int], Sequence[Box]], spec: AdapterSpec, engine: EngineLayout
) -> list[str]:
    """What is wrong with the boxes that engine ranks receive, `{(tensor, rank): boxes}`: none may
    be of what the rank does not hold, and no element may come twice."""
    faults = []
    for name, rank, whole in wanted(spec, engine):
        mine = boxes.get((name, rank), ())
        outside = [box for box in mine if all(one.common(box) != box for one in whole)]
        twice = _twice(mine)
        faults += [
            f"{name}: engine rank {rank} gets {box.shape} from {box.start} on {how} what it holds, "
            + ", ".join(f"{one.shape} from {one.start} on" for one in whole)
            for how, wrong in (("beside", outside), ("twice of", twice))
            for box in wrong
        ]
    return faults


def _twice(boxes: Sequence[Box]) -> list[Box]:
    """Those that have elements in common with another, which is looked for only among those that
    begin before it ends: there are as many boxes of one tensor as trainer ranks that hold some."""
    found, ordered = [], sorted(boxes, key=lambda box: box.start)
    for place, box in enumerate(ordered):
        end = box.start[0] + box.shape[0]
        after = place + 1
        while after < len(ordered) and ordered[after].start[0] < end:
            if box.common(ordered[after]):
                found.append(box)
            after += 1
    return found


def _lay_out(source: int, boxes, spec: AdapterSpec, dtype: Dtype) -> PartLayout:
    entries, offset = [], 0
    for (name, matrix, box), targets in sorted(boxes.items(), key=lambda item: item[1]):
        module, slices = served_slices(spec.shape, spec.by_name[name], matrix, box)
        entry = Entry(name, matrix, module, slices, box, tuple(targets), offset)
        entries.append(entry)
        offset += -(-entry.nbytes(dtype) // ALIGNMENT) * ALIGNMENT
    return PartLayout(source, dtype, offset, tuple(entries))


def to_json(layouts: Iterable[PartLayout]) -> str:
    return json.dumps([asdict(layout) for layout in layouts])


def from_json(text: str) -> list[PartLayout]:
    layouts = []
    for fields in json.loads(text):
        entries = []
        for item in fields.pop("entries"):
            box = Box(tuple(item["box"]["start"]), tuple(item["box"]["shape"]))
            given = {key: tuple(item[key]) for key in ("targets", "slices")}
            entries.append(Entry(**item | given | {"box": box}))
        layouts.append(PartLayout(**fields, entries=tuple(entries)))
    return layouts


def digest(data: np.ndarray) -> int:
    """xxh3-64 of the bytes of a box."""
    return xxhash.xxh3_64_intdigest(data)


def all_finite(data: np.ndarray, dtype: Dtype) -> bool:
    """Whether no value of a box, given as its bytes, is NaN or infinite: has an exponent of ones.

    Of numbers with one sign, these have the largest bits. Negative numbers are above positive ones
    when seen as unsigned integers, and below when seen as signed: two maxima tell of both.
    """
    infinity = INFINITY[dtype]
    unsigned = data.view(infinity.dtype)
    signed = unsigned.view(f"i{infinity.itemsize}")
    top = np.maximum.reduce
    return bool(top(signed) < infinity and top(unsigned) < infinity | SIGN[dtype])


def version_checksum(sent: Sequence[SentPart]) -> str:
    """One checksum of a version: of the checksums of all boxes of all parts."""
    digest = xxhash.xxh3_128()
    for part in sorted(sent, key=lambda p: p.source):
        digest.update(np.array([part.source, *part.checksums], dtype=np.uint64).tobytes())
    return digest.hexdigest()


def check_sent(layouts: Sequence[PartLayout], sent: Sequence[SentPart], version: int) -> None:
    """Raises RefitError unless every part of `version` is there, once, in its size."""
    wanted = {layout.source: layout for layout in layouts}
    got = [part.source for part in sent]
    if missing := sorted(set(wanted) - set(got)):
        raise RefitError(
            f"adapter version {version}: the parts of trainer ranks {missing} are missing"
        )
    if len(got) != len(set(got)) or set(got) - set(wanted):
        raise RefitError(f"adapter version {version}: parts came from trainer ranks {got}")
    for part in sent:
        layout = wanted[part.source]
        if part.version != version:
            raise RefitError(
                f"trainer rank {part.source} sent adapter version {part.version} instead of "
                f"{version}"
            )
        if part.nbytes != layout.nbytes or len(part.checksums) != len(layout.entries):
            raise RefitError(
                f"adapter version {version}: trainer rank {part.source} sent {part.nbytes} bytes "
                f"in {len(part.checksums)} tensors; {layout.nbytes} in {len(layout.entries)} were "
                "agreed on"
            )


def check_box(layout: PartLayout, sent: SentPart, number: int, data: np.ndarray) -> None:
    """Raises RefitError, naming the tensor, when box `number`, given as the bytes that arrived, is
    not what was sent."""
    _check_sum(layout, sent, number, digest(data))


def _check_sum(layout: PartLayout, sent: SentPart, number: int, found: int) -> None:
    if found != sent.checksums[number]:
        raise RefitError(
            f"adapter version {sent.version}: the checksum of {layout.entries[number].tensor} from "
            f"trainer rank {sent.source} differs from the sender's"
        )


def check_received(
    layout: PartLayout, sent: SentPart, memory: Memory, numbers: Sequence[int]
) -> None:
    """`check_box` of the boxes with these numbers, wherever the part's memory is."""
    boxes = [layout.entries[i].span(layout.dtype) for i in numbers]
    if isinstance(memory, np.ndarray):
        for i, span in zip(numbers, boxes, strict=True):
            check_box(layout, sent, i, memory[span])
        return
    from lora_moe_rl.refit import on_device

    found = on_device.checksums([memory[span] for span in boxes])
    for i, one in zip(numbers, found, strict=True):
        _check_sum(layout, sent, i, one)


def check_room(nbytes: int) -> None:
    """Raises RefitError when the machine has not so much memory available."""
    if nbytes > (available := psutil.virtual_memory().available):
        raise RefitError(
            f"no room for {nbytes:,} bytes of an adapter in memory: {available:,} are available"
        )


def host_memory(nbytes: int) -> np.ndarray:
    """Private memory of this process, uint8 `[nbytes]`, page-aligned and there at once: to run out
    while writing kills the process. Raises RefitError when there is no room."""
    check_room(nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=np.uint8)


def open_part(path: str, nbytes: int) -> np.ndarray:
    """A part's buffer, uint8 `[nbytes]`, shared with its sender. Raises RefitError when it cannot
    be opened: the processes must see each other's /proc."""
    try:
        size = os.stat(path).st_size
        if size != nbytes:
            raise RefitError(f"{path} holds {size} bytes, {nbytes} were sent")
        return np.memmap(path, dtype=np.uint8, mode="r+", shape=(nbytes,))
    except OSError as error:
        raise RefitError(
            f"cannot read an adapter from {path} ({error.strerror}): trainer and engine must run "
            "on one machine, in one container and as one user"
        ) from error
