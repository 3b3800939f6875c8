"""Which states engines serve, and who still reads a slot that a newer one wants.

An engine has the newest `number` versions: each that is published takes the slot of the oldest,
once nobody reads that. Who publishes waits for it here, without the ranks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Slots:
    """`served`: samplers, each as which version."""

    def __init__(self, number: int):
        self.number = number
        self.served: dict[str, int] = {}
        self._readers: Counter[int] = Counter()  # of versions that have some
        self._one_is_done = asyncio.Event()

    @contextmanager
    def reading(self, version: int) -> Iterator[None]:
        """Around what is asked of engines under a version."""
        self._readers[version] += 1
        try:
            yield
        finally:
            self._readers[version] -= 1
            if not self._readers[version]:
                del self._readers[version]
                self._one_is_done.set()

    async def free(self, version: int) -> None:
        """Until the slot that `version` takes is read by nobody: from here on nobody asks for what
        is in it."""
        last = version - self.number
        for sampler in [one for one, served in self.served.items() if served <= last]:
            del self.served[sampler]
        while any(one <= last for one in self._readers):
            self._one_is_done.clear()
            await self._one_is_done.wait()
