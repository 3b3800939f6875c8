"""How long engines have kept requests waiting through no fault of whoever asks.

all engines are being started anew, requests may not begin, a version is being taken
├────────────┤  ├──────────────┤                                 held up, 3 s and 4 s
    ├──────────────┤                                             at once, counted once
"""

from __future__ import annotations

import asyncio


class HeldUp:
    """A context manager around each such wait. Those at the same time count once; the event loop's
    clock is taken, which stands still while the process does (run/standing.py)."""

    def __init__(self) -> None:
        self._waiting, self._since, self._sum = 0, 0.0, 0.0

    def seconds(self) -> float:
        """The seconds so far, with those of a wait that still goes on."""
        return self._sum + (_now() - self._since if self._waiting else 0.0)

    def __enter__(self) -> None:
        if not self._waiting:
            self._since = _now()
        self._waiting += 1

    def __exit__(self, *exc: object) -> None:
        self._waiting -= 1
        if not self._waiting:
            self._sum += _now() - self._since


def _now() -> float:
    return asyncio.get_running_loop().time()
