"""Ctrl-C, SIGTERM and SIGHUP, for as long as nothing better is known; and what a run ends with that
was asked to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130  # what a shell reports for a program that SIGINT has ended
_asked: list[int] = []


class Stopped(KeyboardInterrupt):
    """A signal ended the run after one of its steps, as it should; all has been said."""


@contextmanager
def interrupts() -> Iterator[None]:
    """Inside, Ctrl-C and its like raise KeyboardInterrupt: what was started is ended, and one line
    says so. For the main thread."""

    def interrupt(signum, frame):
        if not says_it_again(signum, bool(_asked)):
            _asked.append(signum)
            raise KeyboardInterrupt

    _asked.clear()
    with handled(interrupt):
        yield


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `handler` gets the signals that ask for an end; those of before afterwards. SIGHUP
    where this program is to hear of it alone (not under `nohup`): SIGINT is ignored by whatever a
    script starts in the background, and asks for an end there too."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [number for number in ENDING if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def says_it_again(signum: int, asked: bool) -> bool:
    """Whether a signal to a run that was `asked` to end already is no second wish: of a terminal
    that is closed the kernel tells, and each shell that ends with it once more."""
    return asked and signum == signal.SIGHUP


def raise_what_was_lost() -> None:
    """Raises KeyboardInterrupt if a signal came since `interrupts` was entered: whoever comes here
    has not heard of it. The exception can be lost on its way: a run that was to end while its
    engines started went on, once, on a busy machine; where it was lost was not found."""
    if _asked:
        raise KeyboardInterrupt
