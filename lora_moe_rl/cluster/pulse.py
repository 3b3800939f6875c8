"""Whether an engine that lives and answers does anything about its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

LOOKS = 10  # without a sign of work, one after the other, after which an engine is silent
UNHEARD = object()  # the beat of an engine that did not say what it does


class Pulse:
    """What is known of one engine, which is looked at LOOKS times in `silent_s` seconds.

    A beat is what the engine says of its work: it is equal as long as no request has got a token or
    has ended. Whoever waits for the engine asks for it now and then; `due` says whether somebody
    has to. Looks are counted, not seconds: a controller that was busy itself has not looked.
    """

    def __init__(self, silent_s: float, clock: Callable[[], float] = time.monotonic):
        self.silent_s, self.clock = silent_s, clock
        self.silent = False  # once it is, nobody waits for it any more
        self._requests = self._in_vain = 0
        self._beat: Hashable = None
        self._looked = clock()

    @property
    def every_s(self) -> float:
        """How often to look."""
        return self.silent_s / LOOKS

    def begin(self) -> None:
        """A request is sent."""
        if not self._requests:
            self._in_vain, self._looked = 0, self.clock()
        self._requests += 1

    def end(self) -> None:
        """A request has ended, however that was."""
        self._requests -= 1
        self._in_vain = 0

    def due(self) -> bool:
        """Whether to look: nobody has for a while. Who hears True does."""
        now = self.clock()
        if now - self._looked < self.every_s:
            return False
        self._looked = now
        return True

    def heard(self, beat: Hashable) -> None:
        """What a look gave; UNHEARD when there was no answer."""
        if beat in (self._beat, UNHEARD):
            self._in_vain += 1
        else:
            self._beat, self._in_vain = beat, 0
        self.silent = self.silent or self._in_vain >= LOOKS
