"""The sending side of a refit: a trainer rank packs its part of a version and offers it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

# Where to, from where, times what, and where the product stands until it is cast.
Piece = tuple[torch.Tensor, torch.Tensor, float, torch.Tensor | None]


@dataclass(frozen=True)
class Block:
    """A box of the part: `view` of it in the buffer, in its dtype and shape; `data`, its bytes; the
    pieces that it is made of."""

    entry: Entry
    view: torch.Tensor
    data: np.ndarray
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
        whole = torch.from_numpy(self.buffer).view(getattr(torch, layout.dtype))
        self.runs: list[list[Block]] = []
        scratch: dict[tuple, torch.Tensor] = {}
        for entry in layout.entries:
            view = entry.view(whole)
            scale = scales[entry.site] if entry.matrix == "B" else 1.0
            pieces, found = [], 0
            for box, tensor in held.get(entry.tensor, ()):
                if common := box.common(entry.box):
                    into, out_of = common.within(entry.box), common.within(box)
                    pieces.append(_piece(view[into], tensor[out_of], scale, scratch))
                    found += common.size
            if found != entry.box.size:
                raise RefitError(
                    f"trainer rank {layout.source} holds {found} of {entry.box.size} elements of "
                    f"{entry.tensor} that the plan wants of it"
                )
            data = entry.bytes_of(self.buffer, layout.dtype)
            block = Block(entry, view, data, pieces)
            if self.runs and _end(block) - self.runs[-1][0].entry.offset <= RUN_BYTES:
                self.runs[-1].append(block)
            else:
                self.runs.append([block])

    @torch.no_grad()
    def send(self, version: int) -> SentPart:
        """Packs the current values and offers them. Raises RefitError when one is NaN or infinite.

        A few boxes at a time are cast, checked and hashed: while they are in the processor's cache.
        """
        sums = []
        for run in self.runs:
            for block in run:
                for view, tensor, scale, scratch in block.pieces:
                    view.copy_(tensor if scratch is None else torch.mul(tensor, scale, out=scratch))
            data = self.buffer[run[0].entry.offset : _end(run[-1])]
            if not all_finite(data, self.layout.dtype):
                raise _not_finite(run, version)
            sums += [digest(block.data) for block in run]
        sent = SentPart(self.layout.source, version, "", self.layout.nbytes, tuple(sums))
        return self.outgoing.offer(sent)


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


def _end(block: Block) -> int:
    """The byte of the buffer after a box."""
    return block.entry.offset + block.data.nbytes


def _not_finite(run: list[Block], version: int) -> RefitError:
    """Names the first value that is not."""
    block = next(block for block in run if not torch.isfinite(block.view).all())
    where = (~torch.isfinite(block.view)).nonzero()[0].tolist()
    place = [a + b for a, b in zip(block.entry.box.start, where, strict=True)]
    return RefitError(
        f"adapter version {version}: {block.entry.tensor} holds {block.view[tuple(where)]} at "
        f"{place}; nothing was published"
    )
