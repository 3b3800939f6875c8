"""The requests of one model, one after the other by their sequence numbers.

Clients send the parts of one forward_backward beside each other and the first one last, so a
request waits for all numbers before its own.
"""

from __future__ import annotations

import asyncio

from lora_moe_rl.errors import ServiceError
from lora_moe_rl.service.requests import GAP_S, Request, Requests, Work, failure

LEARNS = "forward_backward"  # of this kind each adds to what the next step takes


class Line:
    """`first`: the number that the first request has; the one that makes the model has 0.
    `gap_s`: how long a missing one is waited for while others stand behind it."""

    def __init__(self, requests: Requests, model: str, owner: str, gap_s: float = GAP_S):
        self.requests, self.model, self.owner, self.gap_s = requests, model, owner, gap_s
        self.next = 0
        self.waiting: dict[int, tuple[Request, Work]] = {}
        self.ended: str | None = None  # why
        self.lost: int | None = None  # the number of a part of the gradient that failed
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def submit(self, number: int, kind: str, work: Work, size: int = 0) -> str:
        """The id under which its reply will be. A number that was asked before is not asked again.
        Raises ServiceError when the model has ended, Refused when too much waits."""
        id = f"{self.model}:request:{number}"
        if self.requests.earlier(id, kind) is not None or number < self.next:
            return id  # a reply that was fetched may be kept no more
        if self.ended is not None:
            raise ServiceError(f"model {self.model} has ended: {self.ended}")
        request = self.requests.add(Request(id, kind, self.owner, size))
        self.waiting[number] = (request, work)
        self._changed.set()
        return id

    def end(self, why: str) -> None:
        """What runs is not disturbed; all that waits fails."""
        self.ended = why
        self._fail_all(f"model {self.model} has ended: {why}")
        self._changed.set()

    async def _run(self) -> None:
        while await self._there():
            request, work = self.waiting.pop(self.next)
            self.next += 1
            reply = await self.requests.answer(request, work)
            if reply.failed and request.kind == LEARNS and self.lost is None:
                self.lost = self.next - 1

    async def _there(self) -> bool:
        """Until the next request is; False at the end."""
        while self.next not in self.waiting:
            if self.ended is not None:
                return False
            self._changed.clear()
            try:
                limit = self.gap_s if self.waiting else None
                await asyncio.wait_for(self._changed.wait(), limit)
            except TimeoutError:
                self._skip()
        return True

    def _skip(self) -> None:
        last = max(self.waiting)
        self._fail_all(
            f"request {self.next} of model {self.model} has not come in {self.gap_s:g} seconds, "
            "and those after it build upon it: load a checkpoint and go on from there"
        )
        if self.lost is None:
            self.lost = self.next
        self.next = last + 1

    def _fail_all(self, message: str) -> None:
        for request, _ in self.waiting.values():
            self.requests.tell(request, failure(message, "user"))
        self.waiting.clear()
