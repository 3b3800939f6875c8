"""What is asked and answered later: futures, and the order of what one model is asked.

A client posts a request and gets its id, then waits for the reply under that id. The id follows
from who is asked and the request's sequence number, so a request that is posted twice, as clients
do when an answer is lost, is one request.

    posted ──> waits for those before it ──> runs ──> reply kept until fetched, and a while after
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.errors import DiskError, LoraMoeRlError, ServiceError

MOST_WAITING, MOST_BYTES = 16384, 2 * 2**30  # requests that are not answered, and what they hold
KEPT_BYTES = 2**30  # of replies
KEPT_S = 120.0  # after a reply was fetched: it may have been lost on the way
UNFETCHED_S = 3600.0  # after a reply was there: clients wait for it all the time
POLL_S = 30.0  # clients wait for 45
GAP_S = 600.0  # clients give a request up after 300
AGAIN = 408  # on which clients ask again; on a 200 they warn their user each time
LARGE = 2**16  # bytes of a reply whose size is told first

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """`failed`: an error is told, not a result. `status`: of HTTP."""

    content: bytes
    media_type: str
    failed: bool = False
    status: int = 200


def in_json(content: dict[str, Any]) -> Reply:
    return Reply(json.dumps(content).encode(), "application/json")


def in_protobuf(content: bytes) -> Reply:
    return Reply(content, "application/x-protobuf")


def failure(message: str, category: str) -> Reply:
    """`category`: user or server, whose fault it is."""
    content = json.dumps({"error": message, "category": category}).encode()
    return Reply(content, "application/json", failed=True)


Work = Callable[[], Awaitable[Reply]]


def given_up() -> bool:
    """Whether it is this task that is cancelled, and not one that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@dataclass(eq=False)
class Request:
    """`owner`: the session; `size`: bytes that it holds until it is answered."""

    id: str
    kind: str
    owner: str
    size: int
    reply: asyncio.Future[Reply] = field(default_factory=asyncio.Future)
    answered: float = 0.0
    fetched: float | None = None
    task: asyncio.Task[Reply] | None = None


class Requests:
    """All requests that are known, in the order in which they came. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, poll_s: float = POLL_S):
        self.clock, self.poll_s = clock, poll_s
        self.known: dict[str, Request] = {}
        self.waiting = self.waiting_bytes = self.kept_bytes = 0

    def earlier(self, id: str, kind: str) -> Request | None:
        """The one of this id. Raises ServiceError when it asked for something else."""
        found = self.known.get(id)
        if found is not None and found.kind != kind:
            raise ServiceError(f"{id} was {found.kind}, and now is {kind}")
        return found

    def add(self, request: Request) -> Request:
        """Takes in a request of a new id. Raises Refused when too many wait."""
        if self.waiting >= MOST_WAITING or self.waiting_bytes + request.size > MOST_BYTES:
            told = f"{self.waiting} requests wait and hold {self.waiting_bytes} bytes; ask again"
            raise Refused(429, "rate_limit_exceeded", told, 1)
        self.waiting += 1
        self.waiting_bytes += request.size
        self.known[request.id] = request
        return request

    def run(self, request: Request, work: Work) -> None:
        """Now, beside all others; `cancel` ends it."""

        def ended(task: asyncio.Task[Reply]) -> None:
            if task.cancelled():  # perhaps before it began
                self.tell(request, failure("this request was given up", "user"))

        request.task = asyncio.create_task(self.answer(request, work))
        request.task.add_done_callback(ended)

    async def answer(self, request: Request, work: Work) -> Reply:
        """Runs to its end; what is raised becomes a reply that tells of it."""
        try:
            reply = await work()
        except asyncio.CancelledError:
            if given_up():
                raise
            log.exception(
                "%s %s failed: something that it waited for was", request.kind, request.id
            )
            reply = failure("this server has failed; see its log", "server")
        except ServiceError as error:
            reply = failure(str(error), "user")
        except DiskError as error:  # whose way out is a run's
            reply = failure(f"{error.fault}, then ask again", "server")
        except LoraMoeRlError as error:
            reply = failure(str(error), "server")
        except Exception:
            log.exception("%s %s failed", request.kind, request.id)
            reply = failure("this server has failed; see its log", "server")
        self.tell(request, reply)
        return reply

    def tell(self, request: Request, reply: Reply) -> None:
        if request.reply.done():
            return
        self.waiting -= 1
        self.waiting_bytes -= request.size
        self.kept_bytes += len(reply.content)
        request.answered = self.clock()
        request.reply.set_result(reply)
        self._make_room(request)

    async def fetch(self, id: str, size_alone: bool) -> Reply:
        """The reply, its size if it is a large one and `size_alone`, or that it is not there yet.
        Raises Refused for a request that is not known, or no more."""
        request = self.known.get(id)
        if request is None:
            raise Refused(410, "gone", f"no request {id} is kept here; ask anew")
        done, _ = await asyncio.wait({request.reply}, timeout=self.poll_s)
        if not done:
            again = in_json({"type": "try_again", "request_id": id, "queue_state": "active"})
            return replace(again, status=AGAIN)
        reply = request.reply.result()
        size = len(reply.content)
        if size_alone and size > LARGE:
            return in_json({"status": "complete_metadata", "response_payload_size": size})
        request.fetched = self.clock()
        return reply

    def cancel(self, id: str) -> None:
        """Raises ServiceError for a request that others build upon."""
        request = self.known.get(id)
        if request is None or request.reply.done():
            return
        if request.task is None:
            raise ServiceError(f"{request.kind} {id} is not given up: others follow it")
        request.task.cancel()

    def forget(self, owner: str) -> None:
        """Gives up what runs by itself, and drops what was answered."""
        for request in [one for one in self.known.values() if one.owner == owner]:
            if request.task is not None:
                request.task.cancel()
            if request.reply.done():
                self._drop(request)

    def sweep(self) -> None:
        """Drops what was fetched a while ago, and what nobody fetches."""
        now = self.clock()
        for request in [one for one in self.known.values() if one.reply.done()]:
            fetched = request.fetched
            until = request.answered + UNFETCHED_S if fetched is None else fetched + KEPT_S
            if until < now:
                self._drop(request)

    def _make_room(self, newest: Request) -> None:
        """Drops replies beyond what is kept: first those that were fetched, then those of which
        clients ask anew (samples), and each time the oldest. The newest stays."""
        if self.kept_bytes <= KEPT_BYTES:
            return
        answered = [one for one in self.known.values() if one.reply.done() and one is not newest]
        for request in sorted(answered, key=lambda one: (one.fetched is None, one.task is None)):
            if self.kept_bytes <= KEPT_BYTES:
                return
            self._drop(request)

    def _drop(self, request: Request) -> None:
        self.kept_bytes -= len(request.reply.result().content)
        del self.known[request.id]
