"""Ctrl-C and SIGTERM, for as long as nothing better is known; and what a run ends with that was
asked to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM)
_asked: list[int] = []


class Stopped(KeyboardInterrupt):
    """A signal ended the run after one of its steps, as it should; all has been said."""


@contextmanager
def interrupts() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM raise KeyboardInterrupt: what was started is ended, and one line
    says so. For the main thread."""

    def interrupt(signum, frame):
        _asked.append(signum)
        raise KeyboardInterrupt

    _asked.clear()
    with handled(interrupt):
        yield


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `handler` gets the signals that ask for an end; those of before afterwards."""
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def raise_what_was_lost() -> None:
    """Raises KeyboardInterrupt if a signal came since `interrupts` was entered: whoever comes here
    has not heard of it. The exception can be lost on its way: a run that was to end while its
    engines started went on, once, on a busy machine; where it was lost was not found."""
    if _asked:
        raise KeyboardInterrupt
