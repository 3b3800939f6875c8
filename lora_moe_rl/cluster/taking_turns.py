"""Engines that take turns with the trainer on the same devices (placement.mode=colocated).

    give_way    no request begins; those that run end; memory is given back     before an update
    publish     the trainer's activations are freed; slots are there again and are written
    come_back   the cache of keys and values is there again, empty              before the proof
    go_on       requests begin again                                            once it is proven

With placement.mode=split nothing is given back, and all of this does nothing. Whether each comes in
its turn is for `turns.py` to say.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from lora_moe_rl.cluster.joining import Joining
from lora_moe_rl.cluster.replicas import PUBLISH_POLL_S
from lora_moe_rl.cluster.turns import Act, Phase, after
from lora_moe_rl.telemetry.clock import Clock


class TakingTurns(Joining):
    """`phase` is None where nothing is shared."""

    def __init__(self, *parts: Any, **more: Any):
        super().__init__(*parts, **more)
        self.phase = Phase.START if self.config.placement.colocated else None
        self.requests_begin = asyncio.Event()
        self.requests_begin.set()
        self._way_given: dict[str, float] = {}  # metrics of the last time

    def take(self, *acts: Act) -> None:
        """Raises OutOfTurn for an act that has no place now."""
        for act in acts:
            if self.phase is not None:
                self.phase = after(self.phase, act)

    async def _free_engine(self, version: int | None, near: int | None = None) -> int:
        """As the base class says, once requests begin: whoever gets an engine asks it before
        anything else happens."""
        with self.held_up:
            while True:
                await self.requests_begin.wait()
                index = await super()._free_engine(version, near)
                if self.requests_begin.is_set():
                    self.take(Act.SAMPLE)
                    return index

    def pause(self) -> None:
        """No request begins any more; those that run are to end."""
        self.requests_begin.clear()

    def resume(self) -> None:
        """They begin all the same: nobody has given way."""
        self.requests_begin.set()

    @property
    def quiet(self) -> bool:
        """Whether no request runs, and no engine is coming back."""
        return not any(self.rolling) and not self.returning

    async def give_way(self) -> None:
        if self.phase is None:
            return
        clock = Clock()
        self.pause()
        while not self.quiet:
            await self.all_back()
            await asyncio.sleep(PUBLISH_POLL_S)
        self.take(Act.PAUSE)
        given = await self._of_all("give_way")
        self.take(Act.GIVE_BACK)
        clock.lap("all")
        self._way_given = {
            "placement/give_way_seconds": clock.seconds["all"],
            "placement/given_back": sum(given),
        }

    async def slots_back(self) -> None:
        """Before slots are written. An update has returned: its ranks keep nothing of it."""
        if self.phase is Phase.TRAIN:
            self.take(Act.FREE)
            if self.config.placement.gives_back == "weights":
                await self._of_all("wake", "weights")
            self.take(Act.WAKE_SLOTS)
        self.take(Act.WRITE)

    async def come_back(self) -> dict[str, float]:
        if self.phase is None or self.phase is Phase.START:
            return {}
        if self.phase is Phase.TRAIN:  # the update was skipped: no slot is written
            await self.slots_back()
        clock = Clock()
        self.take(Act.WAKE_CACHE)
        await self._of_all("wake", "kv_cache")
        clock.lap("all")
        return self._way_given | {"placement/come_back_seconds": clock.seconds["all"]}

    def go_on(self) -> None:
        self.take(Act.GO_ON)
        self.requests_begin.set()

    async def _of_all(self, method: str, *args: Any) -> list[Any]:
        """What every engine answers. One that has died is started anew, with all of its memory, and
        asked too."""
        asked = self._all(lambda index: self._ask(index, method, *args, ask=self._refitted))
        return ray.get([ref for (ref,) in (await asked).values()])
