"""Engines that leave a run and join it (rollout.least_engines).

    absent ──starts, when there is room──> arrived ──takes the next version, proven──> present
      ^                                                                                 │
      └────────────── dies more often than the run allows, or its node is lost ─────────┘

The first least_engines of them are there from the beginning, or the run does not start. The others
are absent then. One that does not start is tried again with each version. Where one that leaves
would leave too few, one that is arriving stands in for it, and takes the version that is served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from lora_moe_rl.cluster.replicas import EngineLeft, Replicas
from lora_moe_rl.errors import LoraMoeRlError
from lora_moe_rl.ports import Ref

log = logging.getLogger(__name__)


class Joining(Replicas):
    def __init__(self, *parts: Any, **more: Any):
        super().__init__(*parts, **more)
        self._arriving: dict[int, asyncio.Task[None]] = {}

    def _leaves(self, index: int, reason: str) -> bool:
        if len(self.present) <= self.config.rollout.firm_engines and not self._one_stands_in():
            return False
        self.absent.add(index)
        self.empty.discard(index)
        self.actors[index].end()
        log.warning(
            "engine-%d has left the run (%s), which goes on with %d; it is started anew, and joins "
            "once it is there",
            *(index, reason, len(self.present)),
        )
        return True

    def _one_stands_in(self) -> bool:
        """An engine that is arriving is present at once, and comes back like one that has died."""
        for index, task in sorted(self._arriving.items()):
            if task.done() and (task.cancelled() or task.exception() is not None):
                continue  # it did not start
            del self._arriving[index]
            self.absent.remove(index)
            begun = self._begun(index, task)
            self.returning[index] = asyncio.create_task(self._bring_back(index, begun))
            log.warning("engine-%d is arriving, and stands in for the one that leaves", index)
            return True
        return False

    async def _begun(self, index: int, task: asyncio.Task[None]) -> None:
        await task
        if self.pinned is not None:  # it may be another than when it began
            await self._refitted(actor := self.actors[index], actor.remote("pin", self.pinned))

    def arrivals(self) -> list[int]:
        """Before a version is published: who has arrived and takes it; others are tried."""
        joining = []
        for index in sorted(self.absent):
            task = self._arriving.get(index)
            if task is not None and not task.done():
                continue
            if task is not None and self._arrived(index, task):
                self.absent.remove(index)
                self.empty.add(index)
                joining.append(index)
                log.warning("engine-%d joins the run with the next version", index)
            else:
                self._arriving[index] = asyncio.create_task(self._begin(index))
        return joining

    def _arrived(self, index: int, task: asyncio.Task[None]) -> bool:
        del self._arriving[index]
        try:
            task.result()
        except LoraMoeRlError as error:
            log.warning("engine-%d does not start, and is tried again: %s", index, error)
            self.actors[index].end()
            return False
        return True

    async def _all(
        self, ask: Callable[[int], Awaitable[list[Ref]]], indices: Iterable[int] | None = None
    ) -> dict[int, list[Ref]]:
        """What `ask` gives of each of the engines (None: those that are present), without those
        that leave over it."""
        asked = self.present if indices is None else list(indices)
        found = await asyncio.gather(*(_unless_it_left(ask(index)) for index in asked))
        return {i: refs for i, refs in zip(asked, found, strict=True) if refs is not None}


async def _unless_it_left(asked: Awaitable[list[Ref]]) -> list[Ref] | None:
    try:
        return await asked
    except EngineLeft:
        return None
