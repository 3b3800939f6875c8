"""Sessions of clients, and the models and samplers that live as long as they do.

A client beats its heart every ten seconds. One that has not for an hour is gone: its models and
samplers are forgotten. What it saved under a name stays.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from lora_moe_rl.endpoint.refusal import Refused
from lora_moe_rl.service.backend import Backend, Lora
from lora_moe_rl.service.bodies import SessionBody
from lora_moe_rl.service.line import Line
from lora_moe_rl.service.requests import Requests

SILENT_S = 3600.0
UNNAMED_KEPT = 8  # samplers of one model
MOST_ENDED = 1000  # sessions whose end is remembered

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Model:
    """`lora`: None until it is made."""

    id: str
    session: Session
    line: Line
    lora: Lora | None = None


@dataclass(eq=False)
class Sampler:
    """`path`: of the checkpoint that it samples from; `model`: the one whose state of some moment
    it is, under no name. Neither: the bare base. `asks` are not answered."""

    id: str
    path: str | None = None
    model: str | None = None
    publishing: asyncio.Task[None] | None = None
    asks: int = 0
    used: float = 0.0

    @property
    def served(self) -> str | None:
        """What the backend calls it by."""
        return None if self.path is None and self.model is None else self.id

    async def ready(self) -> None:
        """Raises what publishing it has."""
        if self.publishing is not None:
            await asyncio.shield(self.publishing)


@dataclass(eq=False)
class Session:
    id: str
    asked: SessionBody
    heard: float
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


class Sessions:
    """`clock`: seconds."""

    def __init__(
        self, backend: Backend, requests: Requests, clock: Callable[[], float] = time.monotonic
    ):
        self.backend, self.requests, self.clock = backend, requests, clock
        self.alive: dict[str, Session] = {}
        self.ended: dict[str, str] = {}  # {session: why}
        self._tasks: set[asyncio.Task[None]] = set()

    def create(self, asked: SessionBody) -> Session:
        session = Session(str(uuid.uuid4()), asked, self.clock())
        self.alive[session.id] = session
        return session

    def find(self, id: str) -> Session:
        """One that lives, which was heard of now. Raises Refused for any other."""
        session = self.alive.get(id)
        if session is None:
            if id in self.ended:
                raise Refused(410, "session_ended", self.why_not(id))
            raise Refused(404, "not_found", self.why_not(id))
        session.heard = self.clock()
        return session

    def why_not(self, id: str) -> str:
        """Why a session does not live."""
        if id in self.ended:
            return f"session {id} has ended: {self.ended[id]}"
        return _not_there(f"session {id}")

    def model(self, id: str) -> Model:
        """Raises Refused for one that is not there."""
        session, _, _ = id.partition(":train:")
        found = self.find(session).models.get(id)
        if found is None:
            raise _unknown(f"model {id}")
        return found

    def sampler(self, id: str) -> Sampler:
        """Raises Refused for one that is not there."""
        session, _, _ = id.partition(":sample:")
        found = self.find(session).samplers.get(id)
        if found is None:
            told = f"sampler {id}; of a model's states without a name {UNNAMED_KEPT} are kept, and "
            raise _unknown(told + "the one that is not asked for longest goes")
        return found

    def add_model(self, session: Session, number: int) -> Model:
        id = f"{session.id}:train:{number}"
        model = Model(id, session, Line(self.requests, id, session.id))
        session.models[id] = model
        return model

    def add_sampler(self, session: Session, sampler: Sampler) -> None:
        """A further state of a model lets those go that were not asked for longest. None goes of
        which something is asked just now."""
        others = [one for one in session.samplers.values() if one.model == sampler.model]
        sampler.used = self.clock()
        session.samplers[sampler.id] = sampler
        if sampler.model is None:
            return
        idle = sorted((one for one in others if not one.asks), key=lambda one: one.used)
        for oldest in idle[: max(len(others) + 1 - UNNAMED_KEPT, 0)]:
            del session.samplers[oldest.id]
            self.later(self.backend.forget_sampler(oldest.id))

    def end(self, session: Session, why: str) -> None:
        """What runs is waited for, in the background, before its model is forgotten."""
        del self.alive[session.id]
        self.ended[session.id] = why
        while len(self.ended) > MOST_ENDED:
            del self.ended[next(iter(self.ended))]
        for model in session.models.values():
            model.line.end(why)
        self.requests.forget(session.id)
        self.later(self._forget(session))

    def sweep(self) -> None:
        """Ends sessions that are silent."""
        for session in list(self.alive.values()):
            if self.clock() - session.heard > SILENT_S:
                self.end(session, f"nothing was heard of it for {SILENT_S:g} seconds")

    def later(self, work: Awaitable[None]) -> None:
        """Runs in the background; what fails there is logged."""
        task = asyncio.create_task(_tried(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forget(self, session: Session) -> None:
        """What runs may still make samplers: it is waited for first."""
        models = list(session.models.values())
        await asyncio.gather(*(model.line.task for model in models), return_exceptions=True)
        for sampler in list(session.samplers.values()):
            if sampler.publishing is not None:
                await asyncio.wait({sampler.publishing})
            if sampler.served is not None:
                await _tried(self.backend.forget_sampler(sampler.id))
        for model in models:
            await _tried(self.backend.forget(model.id))


async def _tried(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:
        log.exception("the backend could not forget something")


def _not_there(what: str) -> str:
    return f"there is no {what}; this server may have been started anew"


def _unknown(what: str) -> Refused:
    return Refused(404, "not_found", _not_there(what))
