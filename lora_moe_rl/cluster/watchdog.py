"""Ends what a run has started on this machine when the run's own process is gone, however it went.

Ray's processes watch each other, but a driver that was killed leaves some of its agents behind.
All of them inherit a mark in their environment; a small process waits for the end of the driver,
then for a while, and kills what still has the mark. Ray's agents write their titles over their
environment, and their parent may be gone before one looks: they are known by what the driver has
told of its children (`tell`), once Ray has started.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

MARK = "LORA_MOE_RL_RUN"
GRACE_S = 5.0  # in which Ray's processes end by themselves
KILL_S = 10.0  # in which the kernel ends what is killed
log = logging.getLogger(__name__)
_pipes: list[Any] = []  # open as long as this process lives


def marked(variable: str, *marks: str) -> list[psutil.Process]:
    """Processes whose environment has `variable` set to one of `marks`, and that still run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            ours = process.environ().get(variable) in marks
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def kill_marked(variable: str, *marks: str) -> None:
    """Kills them until there is none: one may have started another meanwhile. What the kernel does
    not end within KILL_S, since it waits for a device or a server, is named in a warning."""
    deadline = time.monotonic() + KILL_S
    while found := marked(variable, *marks):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in found)
            log.warning("killed %.0f s ago, and not gone: process %s", KILL_S, pids)
            return
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)


def watch(made: Sequence[str] = ()) -> None:
    """From now on what this process starts has the mark, and ends with this process. The files and
    directories that it has `made` go then too."""
    os.environ[MARK] = uuid.uuid4().hex
    # Not among those that it ends, nor of the terminal's group. Our end of the pipe closes with us.
    watchdog = subprocess.Popen(
        [sys.executable, "-m", "lora_moe_rl.cluster.watchdog", os.environ[MARK], *made],
        env={name: value for name, value in os.environ.items() if name != MARK},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _pipes.append(watchdog.stdin)


def tell() -> None:
    """Tells the watchdog of the processes that this one has started by now, and they in turn."""
    children = psutil.Process().children(recursive=True)
    for pipe in _pipes:
        pipe.write(" ".join(str(child.pid) for child in children).encode() + b"\n")
        pipe.flush()


def main(mark: str, *made: str) -> None:
    told: list[psutil.Process] = []
    for line in sys.stdin:  # until the pipe closes
        told += _processes(line)
    found = list({*told, *_with_children(marked(MARK, mark))})
    _, alive = psutil.wait_procs(found, timeout=GRACE_S)
    for process in alive:
        with suppress(psutil.Error):
            process.kill()
    kill_marked(MARK, mark)
    for path in map(Path, made):
        with suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _processes(pids: str) -> list[psutil.Process]:
    """The processes of a line of numbers, without this one."""
    found = []
    for pid in map(int, pids.split()):
        with suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return [process for process in found if process.pid != os.getpid()]


def _with_children(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = set(processes)
    for process in processes:
        with suppress(psutil.Error):
            found.update(process.children(recursive=True))
    return list(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
