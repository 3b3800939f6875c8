"""Who did what when in a run: spans of feed, engines, rewards, trainer and publisher.

    who        what                              number
    feed       wait: a slot
    engine-0   sample, evaluate, teach           the prompt's; several at the same time
    rewards    reward                            the prompt's: from its last sample to its score
    trainer    wait: scored groups, update,      the step's
               checkpoint
    publish    publish                           the version's

A span costs an object in memory, and each step a line of timeline.jsonl. `timeline_views.py` makes
a picture and a trace of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lora_moe_rl.telemetry import names

FEED, REWARDS, TRAINER, PUBLISH = "feed", "rewards", "trainer", "publish"
SAMPLE, REWARD, UPDATE, WAIT = "sample", "reward", "update", "wait: "
CHECKPOINT = "checkpoint"  # until the next update may begin
EVALUATE = "evaluate"  # a request for samples of a held-out prompt
TEACH = "teach"  # a sample that is scored behind another prompt
# Whose waiting is kept, by what is waited for (run/tickets.py).
WAITERS = {
    "a slot": FEED,
    "an evaluation": FEED,
    "a checkpoint": FEED,
    "the run's end": FEED,
    "scored groups": TRAINER,
    "the oldest groups": TRAINER,
}
GAP_S = 1e-3  # waits that are no further apart are one: who waits looks up at every change


@dataclass
class Span:
    """Seconds since 1970; `end` is None as long as it goes on."""

    who: str
    what: str
    number: int
    begin: float
    end: float | None = None

    @property
    def waits(self) -> bool:
        return self.what.startswith(WAIT)

    @property
    def seconds(self) -> float:
        """How long a span took that has ended."""
        assert self.end is not None
        return self.end - self.begin

    def as_list(self) -> list[Any]:
        """What is written: [who, what, number, begin, seconds]."""
        return [self.who, self.what, self.number, round(self.begin, 6), round(self.seconds, 6)]


def engine(index: int) -> str:
    """The name of an engine, as `who`."""
    return f"engine-{index}"


class Timeline:
    """Keeps spans, and hands those that have ended to `write` at the end of each step. The clock
    gives seconds since 1970, and never goes back while a run lives."""

    def __init__(
        self,
        engines: int,
        write: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] | None = None,
    ):
        self.engines, self.write, self.clock = engines, write, clock or _clock()
        self._spans: list[Span] = []  # those that go on, and those that ended since the last step
        self._waits: dict[str, Span] = {}  # the newest of each who
        self._begin = self.clock()

    @contextmanager
    def span(self, who: str, what: str, number: int) -> Iterator[None]:
        """The time that the block takes, whether or not it raises."""
        span = Span(who, what, number, self.clock())
        self._spans.append(span)
        try:
            yield
        finally:
            span.end = self.clock()

    def ended(self, who: str, what: str, number: int, begin: float) -> None:
        """A span that began at `begin`, by this object's clock, and ends now."""
        self._spans.append(Span(who, what, number, begin, self.clock()))

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """For the ticket book. Waits for one thing that follow each other are one span."""
        if (who := WAITERS.get(what)) is None:
            yield
            return
        now, name = self.clock(), WAIT + what
        span = self._waits.get(who)
        if span is None or span.what != name or span.end is None or now - span.end > GAP_S:
            span = self._waits[who] = Span(who, name, 0, now)
            self._spans.append(span)
        span.end = None
        try:
            yield
        finally:
            span.end = self.clock()

    @property
    def under_way(self) -> list[str]:
        """What is being done, without what is waited for."""
        going = (span for span in self._spans if span.end is None and not span.waits)
        return [f"{span.who}: {span.what} {span.number}" for span in going]

    def step(self, step: int) -> dict[str, float]:
        """Ends a step: writes the spans that ended in it, and returns its idle shares."""
        begin, end = self._begin, self.clock()
        found = idle(self._spans, begin, end, self.engines)
        done = [span for span in self._spans if span.end is not None]
        self.write(
            {
                "step": step,
                "begin": round(begin, 6),
                "end": round(end, 6),
                "spans": [span.as_list() for span in done],
            }
        )
        self._spans = [span for span in self._spans if span.end is None]
        self._waits.clear()
        self._begin = end
        return found


def _clock() -> Callable[[], float]:
    """Seconds since 1970 as they are now, which go on evenly: nobody sets them."""
    offset = time.time() - time.perf_counter()
    return lambda: offset + time.perf_counter()


def idle(spans: Iterable[Span], begin: float, end: float, engines: int) -> dict[str, float]:
    """The idle shares of the time from `begin` to `end`: that in which the trainer neither updated
    nor published nor wrote a checkpoint, and that in which an engine had no request for samples,
    the mean over engines, if there are any."""
    busy: dict[str, list[Span]] = {}
    for span in spans:
        if not span.waits:
            busy.setdefault(TRAINER if span.who == PUBLISH else span.who, []).append(span)

    def share(who: str) -> float:
        return 1 - covered(busy.get(who, ()), begin, end) / max(end - begin, 1e-9)

    found = {names.IDLE_TRAINER: share(TRAINER)}
    if engines:
        shares = [share(engine(index)) for index in range(engines)]
        found[names.IDLE_ENGINES] = sum(shares) / engines
    return found


def covered(spans: Iterable[Span], begin: float, end: float) -> float:
    """Seconds between `begin` and `end` in which there is at least one of the spans."""
    total, reached = 0.0, begin
    for span in sorted(spans, key=lambda span: span.begin):
        last = end if span.end is None else min(span.end, end)
        total += max(0.0, last - max(span.begin, reached))
        reached = max(reached, last)
    return total
