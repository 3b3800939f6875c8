"""A disk that is full, read-only or away while a run goes on: what could not be written is kept and
tried again, and it is said each minute. A run that is to go on from there ends until then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_moe_rl.errors import DiskWait

SAY_EVERY_S = 60.0
MOST_KEPT = 16 << 20  # bytes of one file that wait in memory


@contextmanager
def waited_for(path: Path, resume: bool) -> Iterator[None]:
    """Around what a run does in `path` before it begins or, to `resume`, goes on: then what the
    disk refuses is a DiskWait. A server that is away, or late, is none."""
    try:
        yield
    except OSError as error:
        if not resume or not is_of_disk(error):
            raise
        raise disk_wait(path, error) from error


def is_of_disk(error: OSError) -> bool:
    """Whether it is the disk's, and not that of a server or of somebody who is late."""
    late = isinstance(error, TimeoutError) and error.errno is None
    return not late and not isinstance(error, ConnectionError)


def disk_wait(path: Path, error: OSError) -> DiskWait:
    return DiskWait(
        f"the run in {path} cannot go on: {error}. What is there is untouched: free some space, or "
        "see to the disk, then go on with --resume"
    )


class Trouble:
    """What the disk refuses now. `say` gets warnings, at most one a minute for each thing."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.say, self._clock = say, clock
        self._said: dict[str, float] = {}

    def failed(self, what: str, why: str) -> None:
        now = self._clock()
        last = self._said.get(what)
        if last is None or now - last >= SAY_EVERY_S:
            self._said[what] = now
            self.say(f"cannot write {what}: {why}")

    def mended(self, what: str) -> None:
        if self._said.pop(what, None) is not None:
            self.say(f"{what} can be written again")

    def due(self, what: str) -> bool:
        """Whether what failed is to be tried again: once a minute, as it is said."""
        last = self._said.get(what)
        return last is None or self._clock() - last >= SAY_EVERY_S


class Lines:
    """A file that lines are appended to. Those that the disk refuses wait, up to MOST_KEPT bytes,
    and are written in their order with the next; one that came half is completed. What does not fit
    is lost, and said."""

    def __init__(self, path: Path, trouble: Trouble):
        self.path, self.trouble = path, trouble
        self._waiting = bytearray()
        self._dropped = 0

    def append(self, text: str) -> None:
        """`text`: whole lines. Never raises for what the disk refuses."""
        data = text.encode()
        self._waiting += data
        self._flush(len(data))

    def close(self) -> None:
        """Tries once more what waits, for the last time, and says what is lost."""
        if self._waiting:
            self._flush(0)
        if lost := self._dropped + self._waiting.count(b"\n"):
            self.trouble.say(f"{lost} lines of {self.path} are lost: the disk refused them")

    def _flush(self, newest: int) -> None:
        """`newest`: bytes of the lines that may be lost."""
        try:
            _append(self.path, self._waiting)
        except OSError as error:
            if len(self._waiting) > MOST_KEPT:
                self._drop(newest)
            lines = self._waiting.count(b"\n")
            lost = f", and {self._dropped} are lost" if self._dropped else ""
            self.trouble.failed(
                str(self.path), f"{error.strerror}; {lines} lines wait in memory{lost}"
            )
        else:
            self.trouble.mended(str(self.path))

    def _drop(self, newest: int) -> None:
        """The newest lines, but for one that came half."""
        came_half = len(self._waiting) < newest
        kept = self._waiting.find(b"\n") + 1 if came_half else len(self._waiting) - newest
        self._dropped += self._waiting.count(b"\n", kept)
        del self._waiting[kept:]


def _append(path: Path, waiting: bytearray) -> None:
    """Takes from `waiting` what it writes. Raises OSError when that is not all."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        while waiting:
            del waiting[: os.write(descriptor, waiting)]
    finally:
        os.close(descriptor)
