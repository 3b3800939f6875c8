"""How many requests are served at a time, and how many may wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lora_moe_rl.endpoint.refusal import Refused

RETRY_AFTER_S = 1


class Admission:
    """`running` requests at a time, in the order in which they came; `waiting` may stand behind
    them, and each further one is refused at once (429), so that its client asks again."""

    def __init__(self, running: int, waiting: int):
        self.running, self.waiting = running, waiting
        self.inside = self.refused = 0
        self._turns = asyncio.Semaphore(running)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Around one request. Raises Refused when too many wait."""
        if self.inside >= self.running + self.waiting:
            self.refused += 1
            raise Refused(
                429,
                "rate_limit_exceeded",
                f"{self.running} requests are served and {self.waiting} wait; ask again",
                RETRY_AFTER_S,
            )
        self.inside += 1
        try:
            async with self._turns:
                yield
        finally:
            self.inside -= 1
