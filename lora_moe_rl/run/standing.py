"""An event loop whose clock stands still while its process does.

A run may be stopped and go on later: Ctrl-Z, a scheduler that suspends jobs, a container that is
paused. The kernel's clock goes on meanwhile, and all time-outs would be over at once: of rewards
that were stopped with it, of agents, of ranks. A thread looks at the clock twice a second, so that
a longer time between two looks is one in which nothing here could go on, and does not count.

    look 0.5 s look 0.5 s look ──stopped for 600 s──> look      600 s that did not pass
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

LOOK_S, LATE_S = 0.5, 3.0  # a machine that is busy may let a look wait

log = logging.getLogger(__name__)


class Loop(asyncio.SelectorEventLoop):
    """For `asyncio.run(..., loop_factory=Loop)`. What a Ctrl-C breaks off within it is told by its
    KeyboardInterrupt alone, not once more by each task that it ended."""

    def __init__(self) -> None:
        self._broken_off = False
        self._one_looks, self._seen, self._lost = threading.RLock(), time.monotonic(), 0.0
        self._over = threading.Event()
        super().__init__()
        self._looking = threading.Thread(target=self._look, name="clock", daemon=True)
        self._looking.start()

    def time(self) -> float:
        """Seconds that never go back, without those in which this process stood still."""
        with self._one_looks:
            now = time.monotonic()
            late, self._seen = now - self._seen, now
            if late > LATE_S:
                self._lost += late
                log.warning(
                    "this process stood still for %.0f s: it was stopped, or the machine had no "
                    "time for it. No time-out of its own counts that",
                    late,
                )
            return now - self._lost

    def run_forever(self) -> None:
        try:
            super().run_forever()
        except KeyboardInterrupt:
            self._broken_off = True
            raise

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._broken_off:
            super().call_exception_handler(context)

    def close(self) -> None:
        self._over.set()
        self._looking.join()
        super().close()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.time()
