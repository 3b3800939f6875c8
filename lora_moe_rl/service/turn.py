"""Turns at the trainer's ranks, which hold one model at a time; and, where engines are on the same
devices (placement.mode=colocated), at these:

    a forward      requests that run end, others wait; engines give memory back
    requests       whoever waits has them begin again, after those who wait for the ranks already
    a new state    the same in one: engines come back with it

Who has to wait for whom is by who came first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from lora_moe_rl.cluster.replicas import PUBLISH_POLL_S
from lora_moe_rl.cluster.turns import Phase
from lora_moe_rl.errors import CheckpointError, LoraMoeRlError, RefitError, ServiceError

if TYPE_CHECKING:
    from lora_moe_rl.cluster.engines import RolloutEngines

# Of a task, and of those that it starts: whether it has the ranks.
_has_them: ContextVar[bool] = ContextVar("has the ranks", default=False)


class Turn:
    """`on_death` is told what ends the service. `come_back`: awaited with the ranks, engines have
    the devices again and go on after it."""

    def __init__(self, engines: RolloutEngines, come_back: Callable[[], Awaitable[None]]):
        self.engines, self.come_back = engines, come_back
        self.on_death: Callable[[LoraMoeRlError], None] = lambda error: None
        self._ranks = asyncio.Lock()
        self._asking = 0  # who asks engines for something
        self._coming: asyncio.Task[None] | None = None

    @property
    def is_mine(self) -> bool:
        """Whether who asks has the ranks already."""
        return _has_them.get()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """The ranks are asked by nobody else."""
        async with self._ranks:
            before = _has_them.set(True)
            try:
                with self.fatal():
                    yield
            finally:
                _has_them.reset(before)

    @asynccontextmanager
    async def computing(self) -> AsyncIterator[None]:
        """The ranks are asked by nobody else, as in `alone`, and have the devices for
        activations."""
        async with self.alone():
            try:
                await self._devices()
                yield
            finally:
                self._call_back()

    @asynccontextmanager
    async def refitting(self) -> AsyncIterator[None]:
        """As `computing`, and every engine serves: one that comes back is proven by the ranks, and
        what it takes must not be written over meanwhile."""
        while True:
            with self.fatal():
                await self.engines.all_back()
            async with self.computing():
                if not self.engines.returning:
                    yield
                    return

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around what is asked of engines: as long as it lasts, they come back."""
        self._asking += 1
        self._call_back()
        try:
            yield
        finally:
            self._asking -= 1

    async def wait_for_engines(self) -> None:
        """Called by who has the ranks, which others have meanwhile: engines that have died since
        come back, and are proven by them."""
        while self.engines.returning:
            await self._without_ranks(self.engines.all_back())

    async def _without_ranks(self, waiting: Awaitable[None]) -> None:
        self._ranks.release()
        try:
            await waiting
        finally:
            await self._ranks.acquire()

    async def _devices(self) -> None:
        """Engines give memory back, once no request runs any more."""
        try:
            while self.engines.phase is Phase.ROLLOUT:
                self.engines.pause()
                if not self.engines.quiet:
                    await self._without_ranks(self._a_moment())
                    continue
                # One that dies from here on takes what is published next.
                self.engines.overwrite()
                await self.engines.give_way()
        finally:
            if self.engines.phase is Phase.ROLLOUT:  # who wanted them has given up
                self.engines.resume()

    async def _a_moment(self) -> None:
        await self.engines.all_back()
        await asyncio.sleep(PUBLISH_POLL_S)

    def _call_back(self) -> None:
        """Whoever asks engines waits for them no longer than for those who have asked before."""
        if self.engines.phase is Phase.TRAIN and self._asking and self._coming is None:
            self._coming = asyncio.create_task(self._come_back())

    async def _come_back(self) -> None:
        try:
            async with self.alone():
                self._coming = None
                if self.engines.phase is Phase.TRAIN:
                    await self.come_back()
        except LoraMoeRlError as error:
            self.on_death(error)

    @contextmanager
    def fatal(self) -> Iterator[None]:
        """What fails on some ranks and not on others leaves them waiting for each other, and
        without engines nobody can be served: the service ends then, and `on_death` is told."""
        try:
            yield
        except (ServiceError, RefitError, CheckpointError):
            raise
        except LoraMoeRlError as error:
            self.on_death(error)
            raise
