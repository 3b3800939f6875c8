"""`lora-moe-rl train --supervise`: a run that is started again when its process has died.

    start ──> the run's process ends ──> 0, Ctrl-C, an error that would come again: so does this one
                 │
                 └ by a signal, or because an actor or Ray failed (exit code 75)
                      ──> all that it had started has ended ──> start with --resume
                 └ because the disk is full or away (exit code 74) ──> the same, a minute later

It imports nothing heavy, and does nothing but wait: what may fail is in the other process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from lora_moe_rl.cluster.process_end import signal_name
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import DISK, FAULT
from lora_moe_rl.files.checkpoint import MANIFEST, all_of, step_of
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run.signals import ENDING, INTERRUPTED, handled
from lora_moe_rl.telemetry import console

END_S = 60.0  # in which what a dead run had started ends by itself (cluster/watchdog.py)
DISK_S = 60.0  # after which a disk that was full or away is tried again
POLL_S = 0.1
AGAIN = (DISK, FAULT)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # include/uapi/linux/prctl.h


class Newest(NamedTuple):
    """A checkpoint, by its step and when it was written: one that was damaged is written again
    under its step, or gives way to one of an earlier step."""

    step: int = 0
    written: int = 0  # nanoseconds

    @classmethod
    def of(cls, root: Path) -> Newest:
        step = written = 0
        with suppress(OSError):  # the disk is away, or what has the name is none
            if paths := all_of(root):
                step = step_of(paths[-1])
                written = (paths[-1] / MANIFEST).stat().st_mtime_ns
        return cls(step, written)


@dataclass
class Lives:
    """Whether a run is started once more. `limit`: how often in a row without a new checkpoint;
    `newest`: the newest one that there is."""

    limit: int
    newest: Newest
    in_vain: int = 0

    def ended(self, code: int, newest: Newest) -> str | None:
        """What there is to say before it is started again; None: it is not. `code`: the exit code,
        or the negative number of the signal; `newest`: as above, now."""
        if code in (0, *(-number for number in ENDING)) or (code > 0 and code not in AGAIN):
            return None
        if code == DISK:  # however long that may take
            return f"the disk is full or away; the run is started again in {DISK_S:.0f} s"
        self.in_vain = 0 if newest != self.newest else self.in_vain + 1
        self.newest = newest
        if self.in_vain > self.limit:
            return None
        how = f"signal {signal_name(-code)}" if code < 0 else f"exit code {code}"
        return (
            f"the run's process ended ({how}); it is started again, from the checkpoint of step "
            f"{newest.step} ({self.in_vain} of faults.max_resumes={self.limit} in a row without a "
            "new checkpoint)"
        )


@dataclass
class Asked:
    """The signals that asked for an end, as a handler of them. They are handed on to the run's
    `process`, as long as there is one."""

    process: subprocess.Popen | None = None
    waiting: list[int] = field(default_factory=list)  # not handed on
    heard: bool = False

    def __call__(self, signum: int, frame: object) -> None:
        self.heard = True
        self.waiting.append(signum)
        self._hand_on()

    def begin(self, process: subprocess.Popen) -> None:
        self.process = process
        self._hand_on()

    def _hand_on(self) -> None:
        with suppress(IndexError):  # another signal's handler comes between
            while self.process is not None and self.waiting:
                signum = self.waiting.pop(0)
                with suppress(ProcessLookupError):
                    os.kill(self.process.pid, signum)

    def within(self, seconds: float) -> bool:
        """Whether there is one by then; returns as soon as there is."""
        deadline = time.monotonic() + seconds
        while not self.heard and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return self.heard


def supervise(config: RunConfig, first: Sequence[str], later: Sequence[str]) -> int:
    """Runs the command `first`, and as long as its process dies `later`, which goes on from the
    newest checkpoint; `first` again as long as there is nothing to go on from. Returns the exit
    code of the last one, for a signal as shells have it, or 130 when it was asked to end between
    two. To be called in a program's main thread, which must have no other children."""
    run_dir, asked = RunDir(config, resume=True), Asked()
    lives = Lives(config.faults.max_resumes, Newest.of(run_dir.checkpoints))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    command = first
    with handled(asked):
        while True:
            code = _live(command, asked)
            _end_rest()
            if asked.heard:
                break
            message = lives.ended(code, Newest.of(run_dir.checkpoints))
            if message is None:
                _say_given_up(lives)
                break
            _note(run_dir, message)
            if asked.within(DISK_S if code == DISK else 0.0):
                break
            command = later if _has_steps(run_dir) else first
    if asked.waiting:
        return INTERRUPTED
    return code if code >= 0 else 128 - code


def _say_given_up(lives: Lives) -> None:
    if lives.in_vain > lives.limit:
        console.warn(
            f"the run ended {lives.in_vain} times in a row without a new checkpoint, more than "
            f"faults.max_resumes={lives.limit} allows"
        )


def _has_steps(run_dir: RunDir) -> bool:
    """Whether there is something to go on from. When the disk is away the run itself says so."""
    try:
        return run_dir.has_steps
    except OSError:
        return True


def _live(command: Sequence[str], asked: Asked) -> int:
    """One process of the run, from its start to its end: its exit code. It has a session of its
    own: Ctrl-C reaches it once, through this process."""
    end_with_parent = _ending_with_parent()
    try:
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent)
    except OSError as error:  # no memory, or too many processes
        console.warn(f"the run's process cannot be started: {error}")
        asked.within(DISK_S)
        return FAULT
    asked.begin(process)
    while True:  # whatever else has become this process's child is reaped on the way
        pid, status = os.waitpid(-1, 0)
        if pid == process.pid:
            asked.process = None
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode


def _end_rest() -> None:
    """Waits until all that the run had started has ended, and ends what does not by itself. Those
    whose own parents are gone are this process's children by now."""
    deadline = time.monotonic() + END_S
    while children := _children():
        if time.monotonic() > deadline:
            for child in children:
                with suppress(psutil.Error):
                    child.kill()
        time.sleep(POLL_S)


def _children() -> list[psutil.Process]:
    """Those that live; the others are reaped."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def _note(run_dir: RunDir, message: str) -> None:
    """Says something on the console, and in logs/supervisor.log where the run has come so far as to
    make logs."""
    console.warn(message)
    with suppress(OSError):  # it is full, or has no such folder yet
        if run_dir.logs.is_dir():
            with open(run_dir.log_path("supervisor"), "a") as file:
                print(time.strftime("%Y-%m-%d %H:%M:%S"), message, file=file)


def _ending_with_parent() -> Callable[[], None]:
    """What a child calls before it becomes the run: it is asked to end when its parent is gone."""
    libc = ctypes.CDLL(None)  # not between fork and exec
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
