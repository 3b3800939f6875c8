"""Where the processes of a run stand, in Python: asked from outside, also of one that hangs.

An actor, and what it forks, appends the stacks of its threads to its log when it gets a signal
(`log.redirect`). faulthandler writes them in C, without waiting for whatever holds the interpreter.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from lora_moe_rl.telemetry.waiting import frames_of

SIGNAL = signal.SIGUSR2
PATIENCE_S = 1.0  # until it is written
EACH_S = 0.1  # for one to write, before another writes into the same log

Place = tuple[str, int | None, Path]  # an actor: name, process if it is on this machine, log


def dump(actors: Iterable[Place]) -> list[str]:
    """Asks actors and what they have started for their stacks. Returns the names of those that were
    asked; a process that does not listen would be ended by the signal, and gets none."""
    asked = []
    for name, pid, path in actors:
        if pid is None or not (found := listening(pid)):
            continue
        with open(path, "a") as file:
            numbers = ", ".join(map(str, found))
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} stacks of processes {numbers}:", file=file)
        for one in found:
            with suppress(ProcessLookupError):
                os.kill(one, SIGNAL)
                time.sleep(EACH_S)
        asked.append(name)
    time.sleep(PATIENCE_S if asked else 0)
    return asked


def listening(pid: int) -> list[int]:
    """Which of a process and those below it catch the signal."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []
    return [process.pid for process in processes if _catches(process.pid)]


def _catches(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (SIGNAL - 1) & 1)


def append_own(path: Path) -> None:
    """The stacks of this process: its event loop's tasks, and its threads."""
    text = io.StringIO()
    with suppress(RuntimeError):  # no event loop runs
        for task in asyncio.all_tasks():
            print(f"{task.get_name()}:", file=text)
            places = ((frame, frame.f_lineno) for frame in frames_of(task))
            text.writelines(traceback.StackSummary.extract(places).format())
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        print(f"Thread {names.get(ident, ident)}:", file=text)
        text.writelines(traceback.format_stack(frame))
    with open(path, "a") as file:
        file.write(text.getvalue())
