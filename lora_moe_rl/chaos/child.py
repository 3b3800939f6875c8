"""A run of the command line, with every process that it starts in turn, seen from outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

REWARD_WORKER = "lora_moe_rl.rewards.worker"
END_S = 20.0  # in which what a run has started has to be gone after its end


class Child:
    """`lora-moe-rl train ARGUMENTS`, in a session of its own. What it says is appended to
    `console`."""

    def __init__(self, arguments: Sequence[str], console: Path, env: Mapping[str, str]):
        self.console = console
        with open(console, "ab") as file:
            self.process = psutil.Popen(
                [sys.executable, "-m", "lora_moe_rl", "train", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **env},
            )
        self.seen: set[psutil.Process] = set()

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.process.poll()

    def tree(self) -> list[psutil.Process]:
        """All that it has started and that is there; noted, for `end` and `leftovers`."""
        try:
            found = self.process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen.update(found)
        return found

    def controllers(self) -> list[psutil.Process]:
        """The run's own process, of which the child is the supervisor."""
        with suppress(psutil.NoSuchProcess):
            return [p for p in self.process.children() if "lora_moe_rl train" in _words(p)]
        return []

    def actors(self, kind: str) -> list[psutil.Process]:
        """The processes of all actors of a kind (engine, trainer), by number: those that write its
        log and were not started by another that does."""
        logs = {process: name for process in self.tree() if (name := _log_of(process, kind))}
        pids = {process.pid for process in logs}
        first = {p: name for p, name in logs.items() if _parent(p) not in pids}
        return sorted(first, key=lambda process: int(first[process].rpartition("-")[2]))

    def scorers(self) -> list[psutil.Process]:
        """Processes that call reward functions."""
        return [process for process in self.tree() if REWARD_WORKER in _words(process)]

    def said(self, since: int) -> str:
        """The console from byte `since` on."""
        with open(self.console, "rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    @property
    def said_bytes(self) -> int:
        return self.console.stat().st_size

    def end(self) -> None:
        """Ends all that is still there, also what is stopped."""
        self.tree()
        for process in [self.process, *self.seen]:
            if alive(process):
                with suppress(psutil.Error):
                    process.kill()

    def leftovers(self) -> list[str]:
        """Processes that are still there some seconds after the end."""
        _, rest = psutil.wait_procs([p for p in self.seen if alive(p)], END_S)
        return [f"{process.pid} {_words(process)[:80]}" for process in rest if alive(process)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stopped(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_STOPPED
    return False


def _words(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _parent(process: psutil.Process) -> int:
    with suppress(psutil.Error):
        return process.ppid()
    return 0


def _log_of(process: psutil.Process, kind: str) -> str | None:
    """The actor whose log a process writes, if it is of the kind."""
    with suppress(OSError):
        name = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        if name.suffix == ".log" and name.stem.startswith(f"{kind}-"):
            return name.stem
    return None
