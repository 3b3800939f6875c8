"""Seconds by stage."""

from __future__ import annotations

import time


class Clock:
    """Times the stages of a piece of work: `seconds` holds the time of each stage, and `total` that
    up to the last lap."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._started = self._last = time.perf_counter()

    def lap(self, stage: str, at: float | None = None) -> None:
        """Ends a stage that began at the last lap, now or at an earlier `time.perf_counter()`; what
        was over before this clock began took no time."""
        now = time.perf_counter() if at is None else max(at, self._last)
        self.seconds[stage] = now - self._last
        self.seconds["total"] = now - self._started
        self._last = now
