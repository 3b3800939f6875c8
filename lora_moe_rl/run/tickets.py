"""The ticket book: every prompt's way through the run, and who waits for what.

    admit            claim              scored            trained
    ─────> WAITING ─────────> ROLLING ─────────> SCORED ─────────> gone
              ^                  │  │
              │                  │  └── drop ──> gone, counted with its reason
              └─── give_back ────┘

A scored ticket that has become too old goes the same two ways under schedule.stale=drop and redraw.
A ticket's number is that of its prompt, and seeds its samples. The book is in every checkpoint:
what was drawn and not trained is drawn again. It runs in one event loop and needs no locks.

A change wakes those alone who wait for it, one for each ticket that waits, and none looks at all
tickets to find its own: a step of n tickets costs n times as much as one of a single ticket.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import Any

from lora_moe_rl.data.samples import Group, Prompt
from lora_moe_rl.run.schedule import Schedule

Watch = Callable[[str], AbstractContextManager[Any]]
UNKNOWN = -1  # the version of a ticket that has not begun
SLOT, TO_ROLL, SCORED = "slot", "to roll", "scored"  # what wakes those who wait


class State(Enum):
    WAITING = "waiting"
    ROLLING = "rolling"
    SCORED = "scored"


@dataclass(eq=False)
class Ticket:
    """`drawn_at` is where the prompts' source stood before this one was drawn. `version` is the one
    that was served when the ticket was claimed; with schedule.in_flight=continue that of its first
    request, and once it is scored that of its oldest token. `sampled_at`: the time of its last
    sample."""

    prompt: Prompt
    drawn_at: dict[str, Any]
    state: State = State.WAITING
    version: int = UNKNOWN
    sampled_at: float = 0.0
    group: Group | None = field(default=None, repr=False)

    @property
    def number(self) -> int:
        return self.prompt.number


class TicketBook:
    """`done`: numbers at or above the first admitted one that an earlier life of the run has
    finished; they are drawn once more, and skipped. `watch(what)`: a context manager that goes
    around every wait."""

    def __init__(self, schedule: Schedule, done: Iterable[int] = (), watch: Watch = nullcontext):
        self.schedule, self.watch = schedule, watch
        self.tickets: dict[int, Ticket] = {}  # under way, by number
        self.done = set(done)
        self.dropped: Counter[str] = Counter()
        self.stale = 0  # tickets so far that were too old, whatever became of them
        self.wanted: int | None = None  # tickets that are still to be trained; None: no end
        self.closed = False
        self.error: Exception | None = None  # why there is no further step
        self._held = ""  # for what no ticket is drawn, if for anything
        self._next = 0  # the number of the prompt that is drawn next
        self._first: int | None = None  # the oldest number that is under way, or the next
        self._queue: list[int] = []  # a heap: numbers of the tickets that wait
        self._rolling: dict[int, Ticket] = {}  # by number
        self._scored: dict[int, Ticket] = {}  # by number
        self._sleeping: dict[
            str, deque[tuple[asyncio.Future[None], str]]
        ] = {}  # who waits for what

    @property
    def waits(self) -> Counter[str]:
        """What is waited for, and by how many."""
        asleep = (pair for sleeping in self._sleeping.values() for pair in sleeping)
        return Counter(what for future, what in asleep if not future.done())

    @property
    def progress(self) -> tuple[float, ...]:
        """Equal as long as nothing happens to any ticket."""
        counts = map(len, (self.tickets, self._queue, self._rolling, self._scored))
        sampled_at = max((ticket.sampled_at for ticket in self._rolling.values()), default=0.0)
        return (self._next, self.stale, self.dropped.total(), sampled_at, *counts)

    async def slot(self) -> bool:
        """Waits until one more ticket may be drawn. False when the book is closed."""
        await self._until(self._no_slot, SLOT)
        return not self.closed

    def _no_slot(self) -> str:
        """What the next ticket has to wait for; '' for nothing."""
        if self._held:
            return self._held
        if self.wanted is not None and len(self.tickets) >= self.wanted:
            return "the run's end"  # unless one of those under way is dropped
        return "" if self.schedule.may_admit(len(self.tickets)) else "a slot"

    @contextmanager
    def held(self, what: str) -> Iterator[None]:
        """No ticket is drawn before the block has ended, which is for `what`."""
        self._held = what
        try:
            yield
        finally:
            self._held = ""
            self._wake(SLOT)

    def admit(self, prompt: Prompt, drawn_at: dict[str, Any]) -> None:
        """A prompt becomes a ticket, unless it was finished before the run was resumed."""
        self._next = prompt.number + 1
        if self._first is None:
            self._first = prompt.number
        if prompt.number in self.done:
            self._forget()
            return
        assert prompt.number not in self.tickets, f"prompt {prompt.number} was drawn twice"
        self.tickets[prompt.number] = Ticket(prompt, drawn_at)
        heappush(self._queue, prompt.number)
        self._wake(TO_ROLL)

    async def claim(self, version: Callable[[], int]) -> Ticket | None:
        """The oldest waiting ticket, which now rolls at the version that is served; None when the
        book is closed."""
        await self._until(lambda: "" if self._queue else "a ticket to roll", TO_ROLL)
        if self.closed:
            return None
        ticket = self.tickets[heappop(self._queue)]
        ticket.state, ticket.version = State.ROLLING, version()
        self._rolling[ticket.number] = ticket
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        """Its engine died, or it is to be sampled anew: it waits again, for whoever comes next."""
        self._ended(ticket)
        ticket.state, ticket.version, ticket.group = State.WAITING, UNKNOWN, None
        heappush(self._queue, ticket.number)
        self._wake(TO_ROLL)
        self._wake(SCORED)  # the step may have waited for this one

    def asks(self, ticket: Ticket, version: int) -> None:
        """Its first request is made, while `version` is served."""
        if self.schedule.continued:
            ticket.version = version
            self._wake(SCORED)  # the step may have waited for it, which is not as old as it seemed

    def scored(self, ticket: Ticket, group: Group) -> None:
        if self.schedule.continued and (versions := group.versions):
            ticket.version = versions[0]
        self._ended(ticket)
        ticket.state, ticket.group = State.SCORED, group
        self._scored[ticket.number] = ticket
        self._wake(SCORED)

    def drop(self, ticket: Ticket, reason: str) -> None:
        """It is not trained; another one is drawn in its place."""
        self.dropped[reason] += 1
        self._ended(ticket)
        self._finish([ticket])

    async def next_step(self, newest: int) -> list[Ticket] | None:
        """The tickets of the step that updates version `newest`; None when the book is closed.
        Raises what it was closed by, if that was an error."""
        await self._until(lambda: self.missing(newest), SCORED)
        if self.error is not None:
            raise self.error
        if self.closed:
            return None
        step = self.schedule.next_step(self._scored.values(), self._rolling.values(), newest)
        self.stale += sum(self.schedule.is_stale(ticket, newest) for ticket in step)
        return step

    def missing(self, newest: int) -> str:
        """What the step that updates `newest` has to wait for; '' for nothing."""
        self._set_aside(newest)
        return self.schedule.missing(self._scored.values(), self._rolling.values(), newest)

    def _set_aside(self, newest: int) -> None:
        """Scored tickets that the step which updates `newest` may not have: replaced, or sampled
        anew."""
        if (stale := self.schedule.stale) not in ("drop", "redraw"):
            return
        for ticket in list(self._scored.values()):
            if self.schedule.is_stale(ticket, newest):
                self.stale += 1
                if stale == "drop":
                    self.drop(ticket, "too old")
                else:
                    self.give_back(ticket)

    def trained(self, tickets: Sequence[Ticket]) -> None:
        """Trained, and the version that came of it is served: their slots are free."""
        for ticket in tickets:
            del self._scored[ticket.number]
        if self.wanted is not None:
            self.wanted -= len(tickets)
        self._finish(tickets)

    def close(self) -> None:
        """Ends all that wait."""
        self.closed = True
        for what, sleeping in self._sleeping.items():
            self._wake(what, len(sleeping))

    def fail(self, error: Exception) -> None:
        """There is no further step: ends all that wait, and whoever asks for one gets the first
        such error. Unlike one that is raised by who samples, it does not break off an update."""
        self.error = self.error or error
        self.close()

    def state_dict(self, source: dict[str, Any]) -> dict[str, Any]:
        """The state for a checkpoint: where the source has to go on, and what it will draw in vain.
        `source` is where it stands now."""
        data = self.tickets[min(self.tickets)].drawn_at if self.tickets else source
        return {"data": data, "done": sorted(self.done)}

    def _ended(self, ticket: Ticket) -> None:
        """It rolls no more, and is no longer among those to be trained."""
        self._rolling.pop(ticket.number, None)
        self._scored.pop(ticket.number, None)

    def _finish(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            del self.tickets[ticket.number]
            self.done.add(ticket.number)
        self._forget()
        self._wake(SLOT, len(tickets))
        self._wake(SCORED)

    def _forget(self) -> None:
        """Keeps of the finished numbers those that a resumed run would draw again."""
        assert self._first is not None, "a ticket was finished that was never admitted"
        while self._first < self._next and self._first not in self.tickets:
            self.done.discard(self._first)
            self._first += 1

    async def _until(self, missing: Callable[[], str], event: str) -> None:
        """Sleeps until nothing is missing or the book is closed; looks whenever `event` wakes it.
        `missing` names what is."""
        sleeping = self._sleeping.setdefault(event, deque())
        while not self.closed and (what := missing()):
            woken = asyncio.get_running_loop().create_future()
            sleeping.append((woken, what))
            try:
                with self.watch(what):
                    await woken
            except asyncio.CancelledError:
                if woken.done() and not woken.cancelled():  # somebody else may go in its place
                    self._wake(event)
                raise

    def _wake(self, event: str, count: int = 1) -> None:
        """Wakes those who have waited longest for something."""
        sleeping = self._sleeping.get(event, deque())
        while sleeping and count:
            woken, _ = sleeping.popleft()
            if not woken.done():
                woken.set_result(None)
                count -= 1
