"""Standard output and error of a run, which may go before it does: the reader of a pipe has ended,
the terminal was closed, the disk of a file is full. What is said there is then lost, and the run
goes on; it says so once in the log."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

log = logging.getLogger(__name__)

PASSING = (errno.ENOSPC, errno.EDQUOT)  # there may be room again


class Stream:
    """`sys.stdout` or `sys.stderr`, by its name, whatever that is now; writing never raises
    OSError. What is gone for good gives way to /dev/null, for others who write there too."""

    def __init__(self, name: str):
        self._name = name
        self._said = False

    @property
    def _now(self) -> Any:
        """None where it was closed when the program started."""
        stream = getattr(sys, self._name)
        return getattr(stream, "rich_proxied_file", stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    def write(self, text: str) -> int:
        with self._standing():
            if (stream := self._now) is not None:
                stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._standing():
            if (stream := self._now) is not None:
                stream.flush()

    @contextmanager
    def _standing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed(error)
        except RuntimeError:  # a signal's handler says something in the middle of a write
            pass

    def _failed(self, error: OSError) -> None:
        if error.errno not in PASSING:
            self._let_go()
        if not self._said:
            self._said = True
            atexit.register(self._end)
            log.warning("sys.%s cannot be written (%s); the run goes on", self._name, error)

    def _let_go(self) -> None:
        with suppress(OSError, ValueError):  # it may have no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._now.fileno())
            os.close(nowhere)

    def _end(self) -> None:
        """What waits in a buffer would make another exit code of the program's."""
        try:
            self._now.flush()
        except OSError:
            self._let_go()


OUT, ERR = (cast(IO[str], Stream(name)) for name in ("stdout", "stderr"))
