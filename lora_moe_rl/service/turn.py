"""Turns at the trainer's ranks, which hold one model at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from lora_moe_rl.errors import CheckpointError, LoraMoeRlError, RefitError, ServiceError

if TYPE_CHECKING:
    from lora_moe_rl.cluster.engines import RolloutEngines

# Of a task, and of those that it starts: whether it has the ranks.
_has_them: ContextVar[bool] = ContextVar("has the ranks", default=False)


class Turn:
    """`on_death` is told what ends the service."""

    def __init__(self, engines: RolloutEngines):
        self.engines = engines
        self.on_death: Callable[[LoraMoeRlError], None] = lambda error: None
        self._ranks = asyncio.Lock()

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
    async def refitting(self) -> AsyncIterator[None]:
        """So too, and every engine serves: one that comes back is proven by the ranks, and what it
        takes must not be written over meanwhile."""
        while True:
            with self.fatal():
                await self.engines.all_back()
            async with self.alone():
                if not self.engines.returning:
                    yield
                    return

    async def wait_for_engines(self) -> None:
        """Of who has the ranks, which are others' meanwhile: engines that have died since come
        back, and are proven by them."""
        while self.engines.returning:
            self._ranks.release()
            try:
                await self.engines.all_back()
            finally:
                await self._ranks.acquire()

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
