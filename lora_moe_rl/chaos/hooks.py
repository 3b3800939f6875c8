"""Faults that can only be brought about inside a trainer rank: what `recipe.py` puts in the place
of the rank's class.

The injector asks by a file `KIND.asked` in the folder FOLDER; the rank that renames it first has
the fault, and leaves `KIND.done` when it has come about.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lora_moe_rl.cluster.logged_worker import LoggedWorker
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.refit.parts import SentPart
from lora_moe_rl.router_replay.packed import PackedRoutes
from lora_moe_rl.router_replay.travel import SentRoutes, fetch

if TYPE_CHECKING:
    import torch

    from lora_moe_rl.adapters.gradients import Gradients
    from lora_moe_rl.router_replay.routes import Sent

FOLDER = "LORA_MOE_RL_CHAOS_FOLDER"  # in the environment
EXPONENT = np.uint32(1) << np.arange(23, 31, dtype=np.uint32)  # its bits in a float32
LARGEST = 8.0  # of a weight that was flipped: what is beyond it makes NaN of everything


class FaultyWorker(LoggedWorker):
    """A rank that has the faults that it is asked for."""

    def update(self, batch: TrainBatch, routes: list[Sent]) -> UpdateResult:
        if _taken("route.flip"):
            routes = [with_flipped(one) for one in routes if isinstance(one, SentRoutes)]
            _done("route.flip")
        if not _taken("nan.grad"):
            return super().update(batch, routes)
        with _nan_in(self.engine.adapters.gradients):
            return super().update(batch, routes)

    def send(self) -> SentPart:
        weight = self._dense_weight()
        if weight is not None and _taken("adapter.flip"):
            with flipped_weight(weight):
                sent = super().send()
            _done("adapter.flip")
            return sent
        sent = super().send()
        if _taken("shm.corrupt"):
            self.sender.buffer[0] ^= 1
            _done("shm.corrupt")
        return sent

    def _dense_weight(self) -> torch.Tensor | None:
        """A value of a B that this rank sends and that every token meets: of no expert."""
        mine = {entry.tensor for entry in self.sender.layout.entries if entry.matrix == "B"}
        for one in self.engine.adapters.slices():
            if one.name in mine and ".experts." not in one.name:
                held = one.tensor.detach()[one.index]
                return held[(slice(0, 1),) * held.dim()].view(1)  # the rank's own memory
        return None


def _taken(kind: str) -> bool:
    """Whether this rank is to have a fault: of several, one."""
    folder = Path(os.environ[FOLDER])
    try:
        (folder / f"{kind}.asked").rename(folder / f"{kind}.taken")
    except FileNotFoundError:
        return False
    return True


def _done(kind: str) -> None:
    folder = Path(os.environ[FOLDER])
    (folder / f"{kind}.taken").rename(folder / f"{kind}.done")


@contextmanager
def _nan_in(gradients: Gradients) -> Iterator[None]:
    """Inside, the gradients of this rank hold a NaN when they are summed over ranks."""
    reduce = gradients.reduce

    def damaged() -> None:
        next(iter(gradients.flat.values())).view(-1)[0] = np.nan
        _done("nan.grad")
        reduce()

    gradients.reduce = damaged
    try:
        yield
    finally:
        del gradients.reduce  # the method of its class is there again


def with_flipped(routes: SentRoutes) -> SentRoutes:
    """A copy of routes in which a bit of each sample's rows is another."""

    def flip(part: np.ndarray) -> np.ndarray:
        packed = PackedRoutes.from_bytes(part.copy())
        packed.rows[packed.offsets[:-1], 0] ^= 1
        return packed.to_bytes()

    blocks: Sequence = [
        replace(block, parts=tuple(flip(part) for part in fetch(block.parts)))
        for block in routes.blocks
    ]
    return replace(routes, blocks=tuple(blocks))


@contextmanager
def flipped_weight(weight: torch.Tensor) -> Iterator[None]:
    """Inside, `weight` [1], float32, has another bit."""
    import torch

    bits = weight.view(torch.int32)
    before = int(bits[0])
    bits[0] = flipped(before)
    try:
        yield
    finally:
        bits[0] = before


def flipped(bits: int) -> int:
    """The bits of a float32 with one of its exponent flipped: the one that makes it largest, up to
    LARGEST. Both as int32."""
    each = np.array(bits, dtype=np.int32).view(np.uint32) ^ EXPONENT
    sizes = np.abs(each.view(np.float32))
    fit = each[sizes <= LARGEST]  # NaN is in none
    return int(fit[np.argmax(np.abs(fit.view(np.float32)))].view(np.int32))
