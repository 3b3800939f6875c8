"""The ticket book: every prompt's way through the run, and who waits for what.

    admit            claim              scored            trained
    ─────> WAITING ─────────> ROLLING ─────────> SCORED ─────────> gone
              ^                  │  │
              └─── give_back ────┘  └── drop ──> gone, counted with its reason

A ticket's number is that of its prompt, and seeds its samples. The book is in every checkpoint:
what was drawn and not trained is drawn again. It runs in one event loop and needs no locks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.run.schedule import Schedule

UNKNOWN = -1  # the version of a ticket that has not begun


class State(Enum):
    WAITING = "waiting"
    ROLLING = "rolling"
    SCORED = "scored"


@dataclass(eq=False)
class Ticket:
    """`drawn_at` is where the prompts' source stood before this one was drawn. `version` is the one
    that was served when the ticket was claimed; `sampled_at` the time of its last sample."""

    prompt: Prompt
    drawn_at: dict[str, Any]
    state: State = State.WAITING
    version: int = UNKNOWN
    sampled_at: float = 0.0
    group: Group | None = field(default=None, repr=False)

    @property
    def number(self) -> int:
        return self.prompt.row


class TicketBook:
    """`done`: numbers at or above the first admitted one that an earlier life of the run has
    finished; they are drawn once more, and skipped."""

    def __init__(self, schedule: Schedule, done: Iterable[int] = ()):
        self.schedule = schedule
        self.tickets: dict[int, Ticket] = {}  # under way, by number
        self.done = set(done)
        self.dropped: Counter[str] = Counter()
        self.closed = False
        self._next = 0  # the number of the prompt that is drawn next
        self.waits: dict[str, int] = {}  # what is waited for, and by how many
        self._waiting: list[asyncio.Future[None]] = []

    async def slot(self) -> bool:
        """Waits until one more ticket may be drawn. False when the book is closed."""
        await self._until(lambda: self.schedule.may_admit(len(self.tickets)), "a slot")
        return not self.closed

    def admit(self, prompt: Prompt, drawn_at: dict[str, Any]) -> None:
        """A prompt becomes a ticket, unless it was finished before the run was resumed."""
        self._next = prompt.row + 1
        if prompt.row in self.done:
            self._forget()
        else:
            assert prompt.row not in self.tickets, f"prompt {prompt.row} was drawn twice"
            self.tickets[prompt.row] = Ticket(prompt, drawn_at)
        self._changed()

    async def claim(self, version: Callable[[], int]) -> Ticket | None:
        """The oldest waiting ticket, which now rolls at the version that is served; None when the
        book is closed."""
        await self._until(lambda: bool(self._in(State.WAITING)), "a ticket to roll")
        if self.closed:
            return None
        ticket = min(self._in(State.WAITING), key=lambda ticket: ticket.number)
        ticket.state, ticket.version = State.ROLLING, version()
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        """Its engine died: it waits again, for whoever comes next."""
        ticket.state, ticket.version = State.WAITING, UNKNOWN
        self._changed()

    def scored(self, ticket: Ticket, group: Group) -> None:
        ticket.state, ticket.group = State.SCORED, group
        self._changed()

    def drop(self, ticket: Ticket, reason: str) -> None:
        """It is not trained; another one is drawn in its place."""
        self.dropped[reason] += 1
        self._finish([ticket])

    async def next_step(self, newest: int) -> list[Ticket] | None:
        """The tickets of the step that updates version `newest`; None when the book is closed."""
        found: list[Ticket] = []

        def ready() -> bool:
            rolling = self._in(State.ROLLING)
            found[:] = self.schedule.next_step(self._in(State.SCORED), rolling, newest)
            return bool(found)

        await self._until(ready, "scored groups")
        return None if self.closed else found

    def trained(self, tickets: Iterable[Ticket]) -> None:
        """Trained, and the version that came of it is served: their slots are free."""
        self._finish(tickets)

    def close(self) -> None:
        """Ends all that wait."""
        self.closed = True
        self._changed()

    def state_dict(self, source: dict[str, Any]) -> dict[str, Any]:
        """For a checkpoint: where the source has to go on, and what it will draw in vain. `source`
        is where it stands now."""
        data = self.tickets[min(self.tickets)].drawn_at if self.tickets else source
        return {"data": data, "done": sorted(self.done)}

    def _in(self, state: State) -> list[Ticket]:
        return [ticket for ticket in self.tickets.values() if ticket.state is state]

    def _finish(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            del self.tickets[ticket.number]
            self.done.add(ticket.number)
        self._forget()
        self._changed()

    def _forget(self) -> None:
        """Keeps of the finished numbers those that a resumed run would draw again."""
        oldest = min(self.tickets, default=self._next)
        self.done = {number for number in self.done if number >= oldest}

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        self.waits[what] = self.waits.get(what, 0) + 1
        try:
            while not self.closed and not condition():
                changed = asyncio.get_running_loop().create_future()
                self._waiting.append(changed)
                await changed
        finally:
            self.waits[what] -= 1

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
