"""The sending side of a refit: a trainer rank packs its part of a version and offers it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.parts import Entry, PartLayout, SentPart, all_finite, digest
from lora_moe_rl.refit.plan import Box
from lora_moe_rl.refit.transports import Outgoing

if TYPE_CHECKING:
    from lora_moe_rl.adapters.layers import Slice

# Of each canonical tensor, by name: the boxes that this rank holds, and where.
Held = Mapping[str, Sequence[tuple[Box, torch.Tensor]]]


def held_by(slices: Iterable[Slice]) -> Held:
    """What a rank's adapters hold; the tensors are views, so that they are always current."""
    held: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for s in slices:
        view = s.tensor.detach()[s.index]
        held.setdefault(s.name, []).append((Box(s.start, tuple(view.shape)), view))
    return held


RUN_BYTES = 2**18  # of boxes that are written together: what a core's own cache holds
DEVICE_RUN_BYTES = 2**26  # on a device, where each look at some has a price of its own

# Where to, from where, times what, and where the product stands until it is cast.
Piece = tuple[torch.Tensor, torch.Tensor, float, torch.Tensor | None]


@dataclass(frozen=True)
class Block:
    """A box of the part: `view` of it in the memory, in its dtype and shape; `span`, its bytes
    there; the pieces that it is made of."""

    entry: Entry
    view: torch.Tensor
    span: slice
    pieces: list[Piece]


class Sender:
    """One rank's part: its memory, and where each piece of it comes from. Made once a run."""

    def __init__(
        self, layout: PartLayout, held: Held, scales: Mapping[str, float], outgoing: Outgoing
    ):
        """`scales`: of each site. `outgoing`: this rank's end of the transport. Raises RefitError
        when this rank does not hold what the plan wants of it, or when there is no room."""
        self.layout, self.outgoing = layout, outgoing
        self.buffer = outgoing.memory(layout.nbytes)
        self.whole = torch.as_tensor(self.buffer).view(getattr(torch, layout.dtype))
        on_host = isinstance(self.buffer, np.ndarray)
        self.look = self._on_host if on_host else self._on_device
        blocks = self._blocks(held, scales)
        self.runs = _runs(blocks, RUN_BYTES if on_host else DEVICE_RUN_BYTES)

    @torch.no_grad()
    def send(self, version: int) -> SentPart:
        """Packs the current values and offers them. Raises RefitError when one is NaN or
        infinite."""
        sums = self.look(version)
        sent = SentPart(self.layout.source, version, "", self.layout.nbytes, tuple(sums))
        return self.outgoing.offer(sent)

    def _on_host(self, version: int) -> list[int]:
        """A few boxes at a time are cast, checked and hashed: while they are in the processor's
        cache."""
        sums = []
        for run in self.runs:
            _pack(run)
            if not all_finite(self.buffer[_span(run)], self.layout.dtype):
                raise _not_finite(run, version)
            sums += [digest(self.buffer[block.span]) for block in run]
        return sums

    def _on_device(self, version: int) -> list[int]:
        """All is given to the device before anything is waited for."""
        from lora_moe_rl.refit import on_device

        finite, size = [], self.whole.itemsize
        for run in self.runs:
            _pack(run)
            span = _span(run)
            values = self.whole[span.start // size : span.stop // size]
            finite.append(on_device.all_finite(values))
        sums = on_device.checksums([block.view for run in self.runs for block in run])
        for run, good in zip(self.runs, torch.stack(finite).tolist(), strict=True):
            if not good:
                raise _not_finite(run, version)
        return sums

    def _blocks(self, held: Held, scales: Mapping[str, float]) -> Iterator[Block]:
        scratch: dict[tuple, torch.Tensor] = {}
        for entry in self.layout.entries:
            view = entry.view(self.whole)
            scale = scales[entry.site] if entry.matrix == "B" else 1.0
            pieces, found = [], 0
            for box, tensor in held.get(entry.tensor, ()):
                if common := box.common(entry.box):
                    into, out_of = common.within(entry.box), common.within(box)
                    pieces.append(_piece(view[into], tensor[out_of], scale, scratch))
                    found += common.size
            if found != entry.box.size:
                raise RefitError(
                    f"trainer rank {self.layout.source} holds {found} of {entry.box.size} elements "
                    f"of {entry.tensor} that the plan wants of it"
                )
            yield Block(entry, view, entry.span(self.layout.dtype), pieces)


def _runs(blocks: Iterable[Block], nbytes: int) -> list[list[Block]]:
    """Blocks that are looked at together: as many as lie within so many bytes."""
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and block.span.stop - runs[-1][0].span.start <= nbytes:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _pack(run: Sequence[Block]) -> None:
    for block in run:
        for view, tensor, scale, scratch in block.pieces:
            view.copy_(tensor if scratch is None else torch.mul(tensor, scale, out=scratch))


def _span(run: Sequence[Block]) -> slice:
    """The bytes of a run."""
    return slice(run[0].span.start, run[-1].span.stop)


def _piece(
    view: torch.Tensor, tensor: torch.Tensor, scale: float, scratch: dict[tuple, torch.Tensor]
) -> Piece:
    """`scratch`: shared by all pieces of one shape."""
    if scale == 1.0:
        return view, tensor, scale, None
    key = (tensor.shape, tensor.dtype, tensor.device)
    if key not in scratch:
        scratch[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return view, tensor, scale, scratch[key]


def _not_finite(run: list[Block], version: int) -> RefitError:
    """Names the first value that is not."""
    block = next(block for block in run if not torch.isfinite(block.view).all())
    where = (~torch.isfinite(block.view)).nonzero()[0].tolist()
    place = [a + b for a, b in zip(block.entry.box.start, where, strict=True)]
    return RefitError(
        f"adapter version {version}: {block.entry.tensor} holds {block.view[tuple(where)]} at "
        f"{place}; nothing was published"
    )
