"""A tracker in a thread of its own, behind the run's back.

    run ──write, details, adapter──> a queue, in order ──> one thread ──> the tracker ──> a server

A server that is slow, or gone, costs no step anything. Nothing that fails here stops the run: it is
said. An adapter waits as hard links, since the next one takes its place in the run directory.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_moe_rl.files.linking import link
from lora_moe_rl.telemetry.details import Details
from lora_moe_rl.telemetry.trackers.base import Tracker

MOST_CALLS = 2000  # that wait: a tracker further behind does not catch up any more
QUIET_S = 1.0  # an end that takes no longer is not worth a word

log = logging.getLogger(__name__)


class TrackerThread:
    """`folder`: where adapters wait. `say` gets warnings, `kept` tells where all metrics are.

    Calls of `tracker` come in the order in which they were asked for here, and never two at once.
    One that raises, or a queue that is too long, leaves the tracker out from then on: it is asked
    for nothing more but to close. An adapter that cannot be sent is counted, and the next one is
    tried.
    """

    def __init__(self, tracker: Tracker, folder: Path, say: Callable[[str], None], kept: Path):
        self.tracker, self.name = tracker, type(tracker).__name__
        self.adapters = self.lost_adapters = 0  # that were to be sent, and were not
        self._folder, self._say, self._kept = folder, say, kept
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._waiting: tuple[int, Callable[[], None]] | None = None  # an adapter's step and call
        self._last: Callable[[], None] | None = None  # at the end, whatever has failed before
        self._closing = self._left_out = False
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"tracker {self.name}")
        self._thread.start()

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        self._put(lambda: self.tracker.write(step, metrics))

    def details(self, step: int, details: Details) -> None:
        self._put(lambda: self.tracker.details(step, details))

    def adapter(self, step: int, directory: Path) -> None:
        """Takes no longer than some hard links do. One that waits already makes room: a server that
        is too slow for all gets the newest."""
        if self._left_out or not self.tracker.wants_adapters:
            return
        taken = self._folder / f"step-{step:06d}"
        self.adapters += 1
        try:
            shutil.rmtree(taken, ignore_errors=True)
            link(directory, taken)
        except OSError as error:
            self._lose(step, taken, str(error))
            return

        def send() -> None:
            self._send(step, taken)

        with self._changed:
            older, self._waiting = self._waiting, (step, send)
            if older is not None:
                self._calls.remove(older[1])
                self._calls.append(send)
        if older is None:
            self._put(send)
        else:
            why = f"that of step {step} was there before its turn came"
            self._lose(older[0], self._folder / f"step-{older[0]:06d}", why)

    def _send(self, step: int, taken: Path) -> None:
        try:
            self.tracker.adapter(step, taken)
        except Exception as error:
            self._lose(step, taken, self._why(error, f"the adapter of step {step}"))
        else:
            shutil.rmtree(taken, ignore_errors=True)

    def _why(self, error: Exception, what: str) -> str:
        """What a warning says of an error; where it was raised is in the log alone."""
        log.info("%s: %s failed", self.name, what, exc_info=error)
        return str(error) or type(error).__name__

    def _lose(self, step: int, taken: Path, why: str) -> None:
        shutil.rmtree(taken, ignore_errors=True)
        with self._changed:
            self.lost_adapters += 1
            count = f"{self.lost_adapters} of {self.adapters} so far were not sent"
        self._say(
            f"the adapter of step {step} was not sent to the tracker {self.name}: {why}. The run "
            f"goes on, and the next one is tried ({count})"
        )

    def _put(self, call: Callable[[], None]) -> None:
        with self._changed:
            behind = len(self._calls) >= MOST_CALLS
            if not behind and not self._left_out:
                self._calls.append(call)
                self._changed.notify()
        if behind and not self._left_out:
            self._leave_out(f"it is {MOST_CALLS} calls behind")

    def _leave_out(self, why: str) -> None:
        with self._changed:
            self._left_out = True
            self._calls.clear()
            self.lost_adapters += self._waiting is not None
            self._waiting = None
        self._say(
            f"the tracker {self.name} failed and is left out from now on: {why}. {self._kept} has "
            "all metrics"
        )

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call()
            except Exception as error:
                why = self._why(error, "a call")
                if not self._left_out:
                    self._leave_out(why)

    def _next(self) -> Callable[[], None] | None:
        """None once there is nothing left, and nothing will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._closing)
            if not self._calls:
                last, self._last = self._last, None
                return last
            call = self._calls.popleft()
            if self._waiting is not None and call is self._waiting[1]:
                self._waiting = None
            return call

    def close(self, failed: bool) -> None:
        """Asks for the last call, also of a tracker that is left out: what it holds on to is given
        back by it. `wait` waits for it."""
        with self._changed:
            self._last = lambda: self.tracker.close(failed)
            self._closing = True
            self._changed.notify()

    def wait(self, deadline: float) -> None:
        """Returns once all is done, or at `deadline` (of time.monotonic), and says which."""
        self._thread.join(min(QUIET_S, max(0.0, deadline - time.monotonic())))
        left = deadline - time.monotonic()
        if self._thread.is_alive() and left > 0:
            self._say(
                f"waiting for the tracker {self.name}, {left:.0f} s at most "
                f"(tracker.end_timeout_s): {self._under_way()}"
            )
            self._thread.join(left)
        if self._thread.is_alive():
            self._say(
                f"the tracker {self.name} did not end in time: {self._under_way()} may be lost "
                f"there. {self._kept} has all metrics"
            )
        if self.lost_adapters:
            self._say(
                f"{self.lost_adapters} of {self.adapters} adapters were not sent to the tracker "
                f"{self.name}"
            )
        shutil.rmtree(self._folder, ignore_errors=True)

    def _under_way(self) -> str:
        with self._changed:
            waiting = len(self._calls) + (self._last is not None)
        return f"the call that is under way and {waiting} more"
