"""Processes that call a user's functions, and what becomes of the calls when one is lost.

A worker that hangs, ends or answers nonsense is ended with all that it has started, and another is
started in its place; the call that it was doing has failed, and no other.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from lora_moe_rl.cluster.watchdog import kill_marked
from lora_moe_rl.errors import ConfigError

START_TIMEOUT_S = 120.0  # of a worker: it imports what the user's file imports
# An async function ends a late call itself; only when it blocks its loop is it ended from here.
ASYNC_GRACE_S = 5.0
# In the environment of a worker, and so of all that it starts: by it they are found again.
MARK = "LORA_MOE_RL_CALL_WORKER"


class WorkerLost(Exception):
    """Raised when a worker could not start, or ended; the message says how."""


class NoWorker(WorkerLost):
    """Raised when the call was not made, since no worker is left and none can be started."""


@dataclass(eq=False)
class Job:
    """One call."""

    number: int
    arguments: dict[str, Any]
    outcome: asyncio.Future[Any]

    def fail(self, error: WorkerLost) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


@dataclass(eq=False)
class Worker:
    """One process, and the jobs it has been given and has not answered, oldest first. A plain
    function does one after the other, an async one all at the same time."""

    process: subprocess.Popen
    connection: Connection
    mark: str
    is_async: bool = False
    pending: dict[int, Job] = field(default_factory=dict)
    alarms: dict[int, asyncio.TimerHandle] = field(default_factory=dict)

    def end(self) -> None:
        """End the process and whatever it started, also what is in a session of its own or has
        outlived its parent. Harmless the second time."""
        if self.connection.closed:
            return
        for alarm in self.alarms.values():
            alarm.cancel()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        kill_marked(MARK, self.mark)
        self.connection.close()


class Pool:
    """`size` workers, each of them `python -m module FD words...`. `timeout_s`: the longest call,
    and `setting` the key that sets it. `quiet`: what workers print goes nowhere.

    An async function has one worker, which does all calls at the same time: so a limit that it
    keeps (as many requests as a judge may get) is the run's.

    Raises ConfigError when a worker says at its start that it cannot be, WorkerLost when it does
    not start.
    """

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        size: int,
        timeout_s: float,
        setting: str,
        quiet: bool = False,
    ):
        self.size, self.timeout_s = size, timeout_s
        self.late = f"took longer than {setting}={timeout_s:g}"
        self.command = (module, tuple(words), quiet)
        self._numbers = itertools.count()
        self._starting: asyncio.Task[None] | None = None
        self._giving: set[asyncio.Task[None]] = set()  # of jobs whose worker was lost
        self.workers = _start(self.command, size)
        if self.workers[0].is_async:
            self.size = 1
        while len(self.workers) > self.size:
            self.workers.pop().end()

    async def call(self, arguments: dict[str, Any]) -> Any:
        """What a worker answers. Raises WorkerLost when it is lost over it, or late."""
        outcome = asyncio.get_running_loop().create_future()
        job = Job(next(self._numbers), arguments, outcome)
        await self._give([job])
        return await outcome

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []

    async def _give(self, jobs: Sequence[Job]) -> None:
        """Gives jobs to the workers that have least to do; missing workers are started first."""
        try:
            await self._start_missing()
        except (WorkerLost, ConfigError) as error:
            for job in jobs:
                job.fail(NoWorker(f"could not be started again: {error}"))
            return
        loop = asyncio.get_running_loop()
        for job in jobs:
            worker = min(self.workers, key=lambda worker: len(worker.pending))
            worker.pending[job.number] = job
            loop.add_reader(worker.connection.fileno(), self._read, worker)
            with suppress(OSError):  # a dead worker is seen when its answers are read
                worker.connection.send((job.number, job.arguments, self.timeout_s))
            self._set_alarms(worker)

    async def _start_missing(self) -> None:
        """Starts the workers that could not be replaced before. All that wait for them share one
        start."""
        while len(self.workers) < self.size:
            if self._starting is None:
                self._starting = asyncio.create_task(self._start_in_thread())
            starting = self._starting
            try:
                await asyncio.shield(starting)
            finally:
                if self._starting is starting:
                    self._starting = None

    async def _start_in_thread(self) -> None:
        missing = self.size - len(self.workers)
        self.workers += await asyncio.to_thread(_start, self.command, missing)

    def _set_alarms(self, worker: Worker) -> None:
        """Sets a timer for each job that a worker is doing now: all that it has been given if its
        function is async, else the first."""
        patience = self.timeout_s + (ASYNC_GRACE_S if worker.is_async else 0.0)
        doing = list(worker.pending) if worker.is_async else list(worker.pending)[:1]
        for number in doing:
            if number not in worker.alarms:
                loop = asyncio.get_running_loop()
                worker.alarms[number] = loop.call_later(patience, self._lost, worker, self.late)

    def _read(self, worker: Worker) -> None:
        """Called by the event loop when a worker has answered, or has ended."""
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            self._lost(worker, f"ended its process ({_how_it_ended(worker.process)})")
            return
        job = worker.pending.pop(message["number"], None)
        if alarm := worker.alarms.pop(message["number"], None):
            alarm.cancel()
        self._set_alarms(worker)
        if job is not None and not job.outcome.done():
            job.outcome.set_result(message["outcome"])

    def _lost(self, worker: Worker, reason: str) -> None:
        """Ends a worker. What it was doing has failed; others get what it had yet to do."""
        asyncio.get_running_loop().remove_reader(worker.connection.fileno())
        worker.end()
        self.workers.remove(worker)
        jobs = list(worker.pending.values())
        # Of an async function any of those that run may be to blame.
        count = len(jobs) if worker.is_async else 1
        for job in jobs[:count]:
            job.fail(WorkerLost(reason))
        if rest := jobs[count:]:
            task = asyncio.create_task(self._give(rest))
            self._giving.add(task)
            task.add_done_callback(self._giving.discard)


def _start(command: tuple[str, tuple[str, ...], bool], count: int) -> list[Worker]:
    """Workers that are ready. They are started together, then awaited."""
    started = [_launch(*command) for _ in range(count)]
    try:
        return [_await_ready(worker) for worker in started]
    except (WorkerLost, ConfigError):
        for worker in started:
            worker.end()
        raise


def _launch(module: str, words: Sequence[str], quiet: bool) -> Worker:
    """A worker process. Not multiprocessing's: that would import the main script again."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    mark = uuid.uuid4().hex
    nowhere = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(theirs.fileno()), *words],
        pass_fds=(theirs.fileno(),),
        env={**os.environ, "PYTHONPATH": path, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=nowhere,
        stderr=nowhere,
        start_new_session=True,  # Ctrl-C is ours to handle; and killpg reaches its children
    )
    theirs.close()
    return Worker(process, Connection(ours.detach()), mark)


def _await_ready(worker: Worker) -> Worker:
    """Raises ConfigError when the function cannot be imported, WorkerLost when the process ends or
    is silent."""
    try:
        if not worker.connection.poll(START_TIMEOUT_S):
            raise WorkerLost(f"its process was not ready within {START_TIMEOUT_S:g} s")
        message = json.loads(worker.connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise WorkerLost(f"its process ended at start ({_how_it_ended(worker.process)})") from error
    if "error" in message:
        raise ConfigError(message["error"])
    worker.is_async = message["async"]
    return worker


def _how_it_ended(process: subprocess.Popen) -> str:
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=1.0)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "its connection closed"
