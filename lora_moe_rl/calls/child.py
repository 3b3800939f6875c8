"""The worker's side of a pool: jobs come as pickles, answers go as JSON, since what the parent
reads may have been written by the user's code. Imports no torch."""

from __future__ import annotations

import json
import os
import queue
import signal
import sysconfig
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lora_moe_rl.calls.ending import MARK, remove_folders

SHOWN = 200
PACKAGE = str(Path(__file__).parent.parent)
# Frames of these are not of the user's code.
OTHERS = (PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))


def end_me_first() -> None:
    """When memory runs out, the kernel is to end this process and no other."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def read_ahead(connection: Connection) -> queue.SimpleQueue:
    """A queue of jobs (number, arguments, timeout_s) as they come. A thread reads them, so that the
    end of the parent ends this process even while the user's code runs, and with it what that has
    started."""
    jobs: queue.SimpleQueue = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                jobs.put(connection.recv())
            except (EOFError, OSError):
                _end()

    threading.Thread(target=read, daemon=True).start()
    return jobs


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Sends a message to the parent; this process ends when the parent is gone."""
    data = json.dumps(message).encode()
    try:
        connection.send_bytes(data)
    except OSError:
        _end()


def _end() -> None:
    """Ends this process, and what it has started: the parent is gone, who else removes folders."""
    if mark := os.environ.get(MARK):
        remove_folders(mark)
    os.killpg(0, signal.SIGKILL)  # its own group: the parent made it one


def short(value: Any) -> str:
    """`value` as Python shows it, cut to SHOWN characters."""
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def raised(error: BaseException) -> str:
    """What a user's function has raised, and where: the innermost line of a file of the user's own
    (`raised KeyError('x') in /home/me/mine.py, line 7`)."""
    told = f"raised {short(error)}"
    if isinstance(error, OSError) and error.filename is not None:  # which its repr leaves out
        told = f"raised {short(error)[:-1]}, {short(error.filename)})"
    not_own = ("<", *(f"{folder}{os.sep}" for folder in OTHERS))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(not_own)]
    return f"{told} in {own[-1].filename}, line {own[-1].lineno}" if own else told
