"""The receiving side of a refit: writes adapter versions straight into vLLM's slot buffers.

`Receiver` is a vLLM worker extension: its methods become methods of every worker and are called
through `collective_rpc`. A version comes in two steps, so that nothing half-written is ever served:

    refit_stage   check every tensor, and write it into a slot that no request reads
    refit_commit  enter the version for that slot

What of vLLM it touches stands in `refit/slots.py`.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lora_moe_rl.errors import LoraMoeRlError, RefitError
from lora_moe_rl.refit import parts, transports
from lora_moe_rl.refit.copies import Sources, Writer, port_of
from lora_moe_rl.refit.parts import Entry, PartLayout, SentPart
from lora_moe_rl.refit.plan import Box
from lora_moe_rl.refit.slots import Slots
from lora_moe_rl.refit.transports.shm import SHARED_MEMORY
from lora_moe_rl.telemetry import peak

log = logging.getLogger(__name__)


def answer(method):
    """Reports errors as `{"error": text}`: our own, and those of a machine or a device that is full
    or fails, whose trace is in the worker's log.

    An exception would lose its type on the way out of vLLM, and stop its workers where there are
    several.
    """

    @functools.wraps(method)
    def wrapped(self, *args: Any) -> dict[str, Any]:
        try:
            return method(self, *args)
        except (LoraMoeRlError, OSError) as error:
            return {"error": f"worker {self.engine_rank}: {error}"}
        except (RuntimeError, MemoryError) as error:  # torch's are the former
            log.exception("%s failed", method.__name__)
            return {"error": f"worker {self.engine_rank}: {type(error).__name__}: {error}"}

    return wrapped


@dataclass(frozen=True)
class Place:
    """Where box number `entry` of a part goes, whose bytes are `span` of it:
    `buffer[slot][window]`."""

    entry: int
    span: slice
    buffer: torch.Tensor
    window: tuple[slice, ...]


class Worker:
    """What every worker extension of ours has."""

    rank: int  # vLLM's, among those that share a data-parallel rank
    parallel_config: Any

    @property
    def engine_rank(self) -> int:
        """Among all of the engine: tp fastest, then dp."""
        config = self.parallel_config
        return config.data_parallel_index * config.world_size + self.rank

    @answer
    def memory_now(self) -> dict[str, Any]:
        return {"gib": peak.now()}


class Receiver(Worker):
    """Methods of every vLLM worker. `_refit_staged`: (version, slot) between stage and commit."""

    _refit_staged: tuple[int, int] | None = None

    @answer
    def refit_prepare(
        self, layouts_json: str, channel_json: str = SHARED_MEMORY.to_json()
    ) -> dict[str, Any]:
        """Checks vLLM's internals, and finds the place of every box that this worker takes.
        `channel_json`: how the boxes come, see `refit/transports`."""
        if not hasattr(self, "_refit_slots"):
            self._refit_slots = Slots(self.model_runner.lora_manager._adapter_manager)
            self._refit_copies = port_of(self._refit_slots.device)
            self._refit_sources = Sources(self._refit_copies)
        slots = self._refit_slots
        slots.clean.clear()
        self._refit_written: dict[tuple[int, int], list[Writer]] = {}
        self._refit_layouts = {layout.source: layout for layout in parts.from_json(layouts_json)}
        layouts, rank = list(self._refit_layouts.values()), self.engine_rank
        self._refit_places = _find_places(layouts, rank, slots)
        self._refit_incoming = transports.from_json(channel_json).incoming(rank)
        return {"modules": slots.modules, "slots": len(slots.manager.lora_index_to_id)}

    @answer
    def refit_stage(
        self, version: int, sent_json: str, forgotten: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Checks a version and writes it into a free slot. Versions `forgotten` leave theirs first,
        in the same call: each waits for vLLM to end what it computes."""
        started = time.perf_counter()
        self._refit_staged = None
        for older in forgotten:
            self._refit_slots.drop(older)
        sent = [SentPart(**fields) for fields in json.loads(sent_json)]
        parts.check_sent(list(self._refit_layouts.values()), sent, version)
        slot = self._refit_slots.free(version)
        try:
            for part in sent:
                self._refit_write(part, slot)
        finally:  # the senders may change their memory when this has answered
            self._refit_copies.wait()
        self._refit_staged = (version, slot)
        return {"slot": slot, "seconds": time.perf_counter() - started}

    def _refit_write(self, part: SentPart, slot: int) -> None:
        """Checks the boxes of a part, and begins to write them."""
        layout, places = self._refit_layouts[part.source], self._refit_places[part.source]
        buffer = self._refit_incoming.open(layout, part)
        if not isinstance(buffer, np.ndarray):
            self._refit_copy(part, slot, buffer)
            return
        locked = self._refit_sources.locked(part.source, buffer)
        # Each box is written just after its check: while it is in the processor's cache.
        for place, write in zip(places, self._refit_writers(part.source, slot), strict=True):
            data = buffer[place.span]
            parts.check_box(layout, part, place.entry, data)
            write(data)
        if not locked:  # the buffer may go with this call
            self._refit_copies.wait()

    def _refit_copy(self, part: SentPart, slot: int, memory: torch.Tensor) -> None:
        """The same of a part that is on a device."""
        layout, places = self._refit_layouts[part.source], self._refit_places[part.source]
        parts.check_received(layout, part, memory, [place.entry for place in places])
        for place, values in _values(layout, places, memory):
            place.buffer[slot][place.window].copy_(values)

    def _refit_writers(self, source: int, slot: int) -> list[Writer]:
        """What writes each box of a part into a slot; made once."""
        if (source, slot) not in self._refit_written:
            layout = self._refit_layouts[source]
            self._refit_written[source, slot] = [
                self._refit_copies.writer(
                    place.buffer[slot][place.window], layout.entries[place.entry].box.shape
                )
                for place in self._refit_places[source]
            ]
        return self._refit_written[source, slot]

    @answer
    def refit_commit(self, version: int) -> dict[str, Any]:
        """Serves the staged version, and says how much memory this worker has held."""
        if self._refit_staged is None or self._refit_staged[0] != version:
            raise RefitError(f"adapter version {version} is not staged")
        slot = self._refit_staged[1]
        self._refit_staged = None
        self._refit_slots.enter(version, slot)
        return {"slot": slot, "peak_gib": peak.gib()}

    @answer
    def refit_compare(self, version: int, sent_json: str) -> dict[str, Any]:
        """The tensors of a served version that its slot does not hold as they were sent."""
        slot = self._refit_slots.versions().get(version)
        if slot is None:
            raise RefitError(f"adapter version {version} is in no slot")
        sent = [SentPart(**fields) for fields in json.loads(sent_json)]
        parts.check_sent(list(self._refit_layouts.values()), sent, version)
        differing = []
        for part in sent:
            layout = self._refit_layouts[part.source]
            buffer = self._refit_incoming.open(layout, part)
            for place, values in _values(layout, self._refit_places[part.source], buffer):
                held = place.buffer[slot][place.window]
                if not torch.equal(held.cpu(), values.cpu().expand_as(held)):
                    differing.append(layout.entries[place.entry].tensor)
        return {"differing": differing}

    @answer
    def refit_drop(self, version: int) -> dict[str, Any]:
        """Forgets a version, staged or served."""
        if self._refit_staged is not None and self._refit_staged[0] == version:
            self._refit_staged = None
        return {"dropped": self._refit_slots.drop(version)}

    @answer
    def refit_state(self) -> dict[str, Any]:
        """The versions in slots."""
        return {"versions": sorted(self._refit_slots.versions())}


def _find_places(layouts: Sequence[PartLayout], rank: int, slots: Slots) -> dict[int, list[Place]]:
    """The places of each trainer rank's boxes. Raises RefitError when vLLM has no slot for a
    tensor, or one of another shape, dtype or experts, or when the boxes of a tensor do not make up
    what the slot holds of it."""
    mine: dict[tuple[str, int], list[tuple[int, int, Entry]]] = defaultdict(list)
    for layout in layouts:
        if slots.dtype != getattr(torch, layout.dtype):
            raise RefitError(f"adapters are sent in {layout.dtype}, the slots are {slots.dtype}")
        for i, entry in enumerate(layout.entries):
            for slice_ in entry.slices if rank in entry.targets else ():
                mine[entry.tensor, slice_].append((layout.source, i, entry))
    places: dict[int, list[Place]] = {layout.source: [] for layout in layouts}
    dtypes = {layout.source: layout.dtype for layout in layouts}
    for (tensor, slice_), items in mine.items():
        entry = items[0][2]
        if entry.module not in slots.manager.modules:
            raise RefitError(f"vLLM serves no adapters on {entry.module}")
        buffer = slots.buffer(entry.module, slice_, entry.matrix)
        boxes = [entry.box for *_, entry in items]
        boxes = _joined(boxes) if entry.matrix == "B" else boxes
        outer = _outer_box(tensor, boxes)
        _check_shape(tensor, entry.matrix, outer.shape, tuple(buffer.shape[1:]))
        if len(outer.shape) == 3:
            _check_experts(tensor, outer, slots.experts(entry.module))
        every_expert = (slice(None),) * (buffer.dim() - 1 - len(outer.shape))
        for (source, i, entry), box in zip(items, boxes, strict=True):
            window = every_expert + box.within(outer)
            places[source].append(Place(i, entry.span(dtypes[source]), buffer, window))
    return places


def _joined(boxes: Sequence[Box]) -> list[Box]:
    """The same boxes of a B without the rows between them, which other ranks have: of a linear that
    has several outputs side by side, a rank has some rows of each."""
    rows = sorted({(box.start[-2], box.start[-2] + box.shape[-2]) for box in boxes})
    left_out, moved, end = 0, {}, rows[0][0]
    for start, stop in rows:
        left_out += max(0, start - end)
        moved[start] = start - left_out
        end = max(end, stop)
    return [
        replace(box, start=(*box.start[:-2], moved[box.start[-2]], box.start[-1])) for box in boxes
    ]


def _outer_box(tensor: str, boxes: Sequence[Box]) -> Box:
    """What the boxes make up together. They do not overlap: the plan is made so."""
    start = tuple(min(values) for values in zip(*(box.start for box in boxes), strict=True))
    end = tuple(
        max(values)
        for values in zip(
            *([a + n for a, n in zip(box.start, box.shape, strict=True)] for box in boxes),
            strict=True,
        )
    )
    outer = Box(start, tuple(b - a for a, b in zip(start, end, strict=True)))
    if (got := sum(box.size for box in boxes)) != outer.size:
        raise RefitError(f"{tensor}: {got} of {outer.size} elements are planned to arrive")
    return outer


def _check_shape(tensor: str, matrix: str, shape: tuple[int, ...], buffer: tuple[int, ...]) -> None:
    """The rank may be smaller than the slot's; everything else is as the slot."""
    wanted, given = list(buffer[-len(shape) :]), list(shape)
    place = -2 if matrix == "A" else -1
    fits = given[place] <= wanted[place]
    del wanted[place], given[place]
    if not fits or wanted != given:
        raise RefitError(f"{tensor}: {shape} arrives for a slot of {buffer}")


def _check_experts(tensor: str, outer: Box, places: dict[int, int]) -> None:
    """Neighbours, in order: what the plan takes every worker to hold."""
    first, stop = outer.start[0], outer.start[0] + outer.shape[0]
    if places != {expert: expert - first for expert in range(first, stop)}:
        raise RefitError(
            f"{tensor}: experts {first} to {stop - 1} arrive, and vLLM gives this worker the "
            f"experts {sorted(places, key=places.__getitem__)}: leave the placement linear"
        )


def _values(
    layout: PartLayout, places: Sequence[Place], memory: np.ndarray | torch.Tensor
) -> Iterator[tuple[Place, torch.Tensor]]:
    """Each place with what is to be there."""
    whole = torch.as_tensor(memory).view(getattr(torch, layout.dtype))
    for place in places:
        yield place, layout.entries[place.entry].view(whole)
