"""The sending side of a refit: a trainer rank writes its part of a version into shared memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit.parts import PartLayout, SentPart, checksums
from lora_moe_rl.refit.plan import Box

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


class Sender:
    """One rank's part: its memory, and where each piece of it comes from. Made once a run.

    The memory has no name in any file system: it goes with the process, however that ends.
    """

    def __init__(self, layout: PartLayout, held: Held, scales: Mapping[str, float]):
        """`scales`: of each site. Raises RefitError when this rank does not hold what the plan
        wants of it, or when there is no room."""
        self.layout = layout
        self.descriptor, self.buffer = _memory(layout.nbytes)
        self.whole = torch.from_numpy(self.buffer).view(getattr(torch, layout.dtype))
        self.pieces: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        for entry in layout.entries:
            view = entry.view(self.whole)
            scale = scales[entry.site] if entry.matrix == "B" else 1.0
            found = 0
            for box, tensor in held.get(entry.tensor, ()):
                if common := box.common(entry.box):
                    into, out_of = common.within(entry.box), common.within(box)
                    self.pieces.append((view[into], tensor[out_of], scale))
                    found += common.size
            if found != entry.box.size:
                raise RefitError(
                    f"trainer rank {layout.source} holds {found} of {entry.box.size} elements of "
                    f"{entry.tensor} that the plan wants of it"
                )

    @torch.no_grad()
    def send(self, version: int) -> SentPart:
        """Writes the current values. Raises RefitError when one is NaN or infinite."""
        for view, tensor, scale in self.pieces:
            view.copy_(tensor if scale == 1.0 else tensor * scale)
        if not all(torch.isfinite(end) for end in torch.aminmax(self.whole)):
            raise self._not_finite(version)
        path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        sums = checksums(self.layout, self.buffer)
        return SentPart(self.layout.source, version, path, self.layout.nbytes, sums)

    def _not_finite(self, version: int) -> RefitError:
        """Names the first value that is not."""
        for entry in self.layout.entries:
            values = entry.view(self.whole)
            if not torch.isfinite(values).all():
                where = (~torch.isfinite(values)).nonzero()[0].tolist()
                place = [a + b for a, b in zip(entry.box.start, where, strict=True)]
                return RefitError(
                    f"adapter version {version}: {entry.tensor} holds {values[tuple(where)]} at "
                    f"{place}; nothing was published"
                )
        raise AssertionError(f"adapter version {version}: every value is finite")


def _memory(nbytes: int) -> tuple[int, np.ndarray]:
    # Asked first: memory without a name has no limit of its own but the machine's.
    if nbytes > (available := psutil.virtual_memory().available):
        raise RefitError(
            f"no room for {nbytes:,} bytes of an adapter in memory: {available:,} are available"
        )
    descriptor = os.memfd_create("lora_moe_rl")
    os.posix_fallocate(descriptor, 0, nbytes)  # now: to run out while writing kills the process
    return descriptor, np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
