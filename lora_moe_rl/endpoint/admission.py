"""How many requests are served at a time, how many may wait, and how much they hold meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from lora_moe_rl.endpoint.refusal import Refused

RETRY_AFTER_S = 1
MOST_BYTES = 2**30


class Admission:
    """`running` requests at a time, in the order in which they came; `waiting` may stand behind
    them, and all bodies together have up to `most_bytes`. Each further one is refused at once
    (429), so that its client asks again."""

    def __init__(self, running: int, waiting: int, most_bytes: int = MOST_BYTES):
        self.running, self.waiting, self.most_bytes = running, waiting, most_bytes
        self.inside = self.refused = self.bytes = 0
        self.turns = asyncio.Semaphore(running)

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Around one request, from before its body is read. Raises Refused when too many wait."""
        if self.inside >= self.running + self.waiting:
            raise self.refusal(f"{self.running} requests are served and {self.waiting} wait")
        self.inside += 1
        place = Place(self)
        try:
            yield place
        finally:
            self.inside -= 1
            self.bytes -= place.bytes

    def refusal(self, what: str) -> Refused:
        """The refusal of one request more, which is counted."""
        self.refused += 1
        return Refused(429, "rate_limit_exceeded", f"{what}; ask again", RETRY_AFTER_S)


class Place:
    """What one request holds."""

    def __init__(self, admission: Admission):
        self.admission, self.bytes = admission, 0

    def hold(self, num_bytes: int) -> None:
        """So many bytes more of its body are here. Raises Refused when all hold too much."""
        admission = self.admission
        if admission.bytes + num_bytes > admission.most_bytes:
            raise admission.refusal(f"requests hold {admission.bytes} bytes")
        admission.bytes += num_bytes
        self.bytes += num_bytes
