"""The sending side of a refit: a trainer rank packs its part of a version and offers it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from lora_moe_rl.adapters.served import Sum
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.copies import port_of
from lora_moe_rl.refit.parts import Entry, PartLayout, SentPart, all_finite, digest
from lora_moe_rl.refit.plan import Box
from lora_moe_rl.refit.transports import Outgoing

if TYPE_CHECKING:
    from lora_moe_rl.adapters.layers import Served
    from lora_moe_rl.refit.parts import Memory

# Of each canonical tensor, by name: the boxes that this rank holds, and where.
Held = Mapping[str, Sequence[tuple[Box, torch.Tensor | Sum]]]


def held_by(served: Iterable[Served]) -> Held:
    """What a rank's adapters hold; the tensors are views, so that they are always current."""
    held: dict[str, list[tuple[Box, torch.Tensor | Sum]]] = {}
    for name, start, view in served:
        held.setdefault(name, []).append((Box(start, tuple(view.shape)), view))
    return held


RUN_BYTES = 2**18  # of boxes that are written together: what a core's own cache holds
DEVICE_RUN_BYTES = 2**26  # on a device, where each look at some has a price of its own

# Where to, from where, times what (None: as it is), and where the product or the sum stands until
# it is cast.
Piece = tuple[torch.Tensor, torch.Tensor | Sum, float | None, torch.Tensor | None]


@dataclass(frozen=True)
class Block:
    """A box of the part: `view` of it where it is packed, in its dtype and shape; `data`, its bytes
    in the part's memory; the pieces that it is made of."""

    entry: Entry
    view: torch.Tensor
    data: Memory
    pieces: list[Piece]


@dataclass(frozen=True)
class Run:
    """Blocks that are looked at together: `span`, their bytes in the part; `packed`, these bytes
    where they are packed."""

    span: slice
    packed: torch.Tensor
    blocks: list[Block]


class Sender:
    """One rank's part: its memory, and where each piece of it comes from. Made once a run.

    adapters on the host,  part on the host     packed there, and checked in the cache
    adapters on a GPU,     part on the host     packed on the GPU a run at a time, copied
    adapters on a GPU,     part on the GPU      packed and checked there
    """

    def __init__(
        self, layout: PartLayout, held: Held, scales: Mapping[str, float], outgoing: Outgoing
    ):
        """`scales`: of each site; `factor`, which may be set later, is on top of each (`Switch`).
        `outgoing`: this rank's end of the transport. Raises RefitError when this rank does not hold
        what the plan wants of it, or when there is no room."""
        self.layout, self.outgoing = layout, outgoing
        tensors = (tensor for boxes in held.values() for _, tensor in boxes)
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        self.buffer = outgoing.memory(layout.nbytes, device)
        on_host = isinstance(self.buffer, np.ndarray)
        self.copies = port_of(device)
        self.staged = on_host and self.copies.apart
        self.runs: list[Run] = []
        runs = _runs(layout, RUN_BYTES if on_host and not self.staged else DEVICE_RUN_BYTES)
        room = torch.as_tensor(self.buffer)
        if self.staged:
            longest = max((_length(_span(run, layout)) for run in runs), default=0)
            room = torch.zeros(longest, dtype=torch.uint8, device=device)
            self.copies.lock(self.buffer)
            weakref.finalize(self, self.copies.unlock, self.buffer).atexit = False
        self.factor = 1.0
        scratch: dict[tuple, torch.Tensor] = {}
        for entries in runs:
            span = _span(entries, layout)
            packed = room[: _length(span)] if self.staged else room[span]
            values, blocks = packed.view(getattr(torch, layout.dtype)), []
            for entry in entries:
                view = replace(entry, offset=entry.offset - span.start).view(values)
                pieces = self._pieces(entry, view, held, scales, scratch)
                data = self.buffer[entry.span(layout.dtype)]
                blocks.append(Block(entry, view, data, pieces))
            self.runs.append(Run(span, packed, blocks))

    @torch.no_grad()
    def send(self, version: int) -> SentPart:
        """Packs the current values and offers them. Raises RefitError when one is NaN or
        infinite."""
        if not isinstance(self.buffer, np.ndarray):
            sums = self._on_device(version)
        else:
            sums = self._through_host(version) if self.staged else self._on_host(version)
        sent = SentPart(self.layout.source, version, "", self.layout.nbytes, tuple(sums))
        return self.outgoing.offer(sent)

    def _on_host(self, version: int) -> list[int]:
        """A few boxes at a time are cast, checked and hashed: while they are in the processor's
        cache."""
        sums = []
        for run in self.runs:
            _pack(run, self.factor)
            sums += self._checked(run, version)
        return sums

    def _through_host(self, version: int) -> list[int]:
        """The host checks and hashes a run while the next one is packed and copied. In the order of
        the device, a run is packed after the one before it is copied."""
        sums, before = [], None
        for run in self.runs:
            run.packed.zero_()  # what another run has left between the boxes
            _pack(run, self.factor)
            wait = self.copies.fetch(self.buffer[run.span], run.packed)
            if before is not None:
                sums += self._arrived(*before, version)
            before = run, wait
        return sums + self._arrived(*before, version) if before is not None else sums

    def _arrived(self, run: Run, wait: Callable[[], None], version: int) -> list[int]:
        wait()
        return self._checked(run, version)

    def _checked(self, run: Run, version: int) -> list[int]:
        """The checksums of a run that is in the host's memory."""
        if not all_finite(self.buffer[run.span], self.layout.dtype):
            raise self._not_finite(run, version)
        return [digest(block.data) for block in run.blocks]

    def _on_device(self, version: int) -> list[int]:
        """All is given to the device before anything is waited for."""
        from lora_moe_rl.refit import on_device

        finite, dtype = [], getattr(torch, self.layout.dtype)
        for run in self.runs:
            _pack(run, self.factor)
            finite.append(on_device.all_finite(run.packed.view(dtype)))
        sums = on_device.checksums([block.data for run in self.runs for block in run.blocks])
        for run, good in zip(self.runs, torch.stack(finite).tolist(), strict=True):
            if not good:
                raise self._not_finite(run, version)
        return sums

    def _pieces(
        self,
        entry: Entry,
        view: torch.Tensor,
        held: Held,
        scales: Mapping[str, float],
        scratch: dict[tuple, torch.Tensor],
    ) -> list[Piece]:
        scale = scales[entry.site] if entry.matrix == "B" else None
        pieces, found = [], 0
        for box, tensor in held.get(entry.tensor, ()):
            if common := box.common(entry.box):
                into, out_of = common.within(entry.box), common.within(box)
                pieces.append(_piece(view[into], tensor[out_of], scale, scratch))
                found += common.size
        if found != entry.box.size:
            raise RefitError(
                f"trainer rank {self.layout.source} holds {found} of {entry.box.size} elements of "
                f"{entry.tensor} that the plan wants of it"
            )
        return pieces

    def _not_finite(self, run: Run, version: int) -> RefitError:
        """Names the first value that is not."""
        values = torch.as_tensor(self.buffer).view(getattr(torch, self.layout.dtype))
        for block in run.blocks:
            view = block.entry.view(values)
            if not torch.isfinite(view).all():
                break
        where = (~torch.isfinite(view)).nonzero()[0].tolist()
        place = [a + b for a, b in zip(block.entry.box.start, where, strict=True)]
        return RefitError(
            f"adapter version {version}: {block.entry.tensor} holds {view[tuple(where)]} at "
            f"{place}; nothing was published"
        )


def _runs(layout: PartLayout, nbytes: int) -> list[list[Entry]]:
    """Boxes that are looked at together: as many as lie within so many bytes."""
    runs: list[list[Entry]] = []
    for entry in layout.entries:
        if runs and entry.span(layout.dtype).stop - runs[-1][0].offset <= nbytes:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs


def _span(entries: Sequence[Entry], layout: PartLayout) -> slice:
    """The bytes of a run."""
    return slice(entries[0].offset, entries[-1].span(layout.dtype).stop)


def _length(span: slice) -> int:
    return span.stop - span.start


def _pack(run: Run, factor: float) -> None:
    for block in run.blocks:
        for view, tensor, scale, scratch in block.pieces:
            if isinstance(tensor, Sum):
                tensor = tensor.value(out=scratch)
            if scale is None:
                view.copy_(tensor)
            else:
                view.copy_(torch.mul(tensor, scale * factor, out=scratch))


def _piece(
    view: torch.Tensor,
    tensor: torch.Tensor | Sum,
    scale: float | None,
    scratch: dict[tuple, torch.Tensor],
) -> Piece:
    """`scratch`: shared by all pieces of one shape."""
    if scale is None and not isinstance(tensor, Sum):
        return view, tensor, None, None
    key = (tensor.shape, tensor.dtype, tensor.device)
    if key not in scratch:
        scratch[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return view, tensor, scale, scratch[key]
