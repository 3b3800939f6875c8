"""Seconds by stage."""

from __future__ import annotations

import time


class Clock:
    """`seconds` holds the time of each stage, and `total` up to the last lap."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._started = self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Ends a stage that began at the last lap."""
        now = time.perf_counter()
        self.seconds[stage] = now - self._last
        self.seconds["total"] = now - self._started
        self._last = now
