"""Processes that call a user's functions, and what becomes of the calls when one is lost.

    call ──> waiting ──one at a time (a plain function), all at once (an async one)──> a worker
      ^                                                                                  │
      └───────────────────────────────────answer─────────────────────────────────────────┘

A worker that hangs, ends or answers nonsense is ended with all that it has started, and another is
started in its place; the call that it was doing has failed, and no other.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lora_moe_rl.calls.ending import MARK, end_marked
from lora_moe_rl.calls.wire import Nonsense, Wire, framed
from lora_moe_rl.cluster.process_end import signal_name
from lora_moe_rl.cluster.watchdog import KILL_S
from lora_moe_rl.errors import ConfigError

START_TIMEOUT_S = 120.0  # of a worker: it imports what the user's file imports
# An async function ends a late call itself; only when it blocks its loop is it ended from here.
ASYNC_GRACE_S = 5.0


class WorkerLost(Exception):
    """Raised when a worker could not start, or ended; the message says how."""


class NoWorker(WorkerLost):
    """Raised when the call was not made, since a worker was lost and none can be started."""


@dataclass(eq=False)
class Job:
    """One call, as it is sent."""

    number: int
    frame: bytes
    outcome: asyncio.Future[Any]
    alarm: asyncio.TimerHandle | None = None

    def fail(self, error: BaseException) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(error)


@dataclass(eq=False)
class Worker:
    """One process, the jobs that it was given and has not answered, and the tasks that send them
    and hear its answers. `told`: what it said of its function at its start."""

    process: subprocess.Popen
    wire: Wire
    mark: str
    told: Mapping[str, Any] = field(default_factory=dict)
    pending: dict[int, Job] = field(default_factory=dict)
    sending: asyncio.Task[None] | None = None
    hearing: asyncio.Task[None] | None = None
    ended: bool = False
    _one_ends_it: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_async(self) -> bool:
        return self.told.get("async", False)

    @property
    def free(self) -> bool:
        """Whether it is to be given another job now."""
        return self.is_async or not self.pending

    def end(self) -> None:
        """End the process and whatever it started, also what is in a session of its own or has
        outlived its parent. Harmless the second time."""
        with self._one_ends_it:
            if self.ended:
                return
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # then it is named by what follows
                self.process.wait(KILL_S)
            end_marked(self.mark)
            self.wire.close()
            self.ended = True


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
        self._waiting: deque[Job] = deque()
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: set[Worker] = set()
        with ThreadPoolExecutor(1) as thread:  # a loop may be running here
            self.workers = thread.submit(_start, self.command, size).result()
        if self.workers[0].is_async:
            self.size = 1
        while len(self.workers) > self.size:
            self.workers.pop().end()

    async def call(self, arguments: dict[str, Any]) -> Any:
        """What a worker answers. Raises WorkerLost when it is lost over it, or late."""
        number, outcome = next(self._numbers), asyncio.get_running_loop().create_future()
        frame = framed((number, arguments, self.timeout_s))
        self._waiting.append(Job(number, frame, outcome))
        self._give()
        return await outcome

    def close(self) -> None:
        ended, self.workers = {*self.workers, *self._ending}, []
        for task in list(self._tasks):
            task.cancel()
        for worker in ended:
            worker.end()

    def _give(self) -> None:
        """Sees to it that jobs that wait are sent: to each worker of a plain function one, the next
        when that is answered; to that of an async one all. Missing workers are started."""
        for worker in list(self.workers):
            # It has ended with nothing to do; or an event loop has, with its work half done.
            if _over(worker.hearing) and (worker.pending or worker.process.poll() is not None):
                self._lose(worker, None)
        if self._waiting and len(self.workers) < self.size and _over(self._starting):
            self._starting = self._run(self._start_missing())
        for worker in self.workers:
            if self._waiting and worker.free and _over(worker.sending):
                worker.sending = self._run(self._send(worker))

    def _run(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(step)
        self._tasks.add(task)  # the event loop itself holds tasks weakly
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A fault of ours is raised by all calls: nobody waits for ever."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            given = [job for worker in self.workers for job in worker.pending.values()]
            for job in (*self._waiting, *given):
                job.fail(error)

    async def _send(self, worker: Worker) -> None:
        patience = self.timeout_s + (ASYNC_GRACE_S if worker.is_async else 0.0)
        loop = asyncio.get_running_loop()
        try:
            while self._waiting and worker.free and worker in self.workers:
                job = self._waiting.popleft()
                if job.outcome.done():  # nobody waits for it any more
                    continue
                worker.pending[job.number] = job
                job.alarm = loop.call_later(patience, self._lose, worker, self.late)
                if _over(worker.hearing):
                    worker.hearing = self._run(self._hear(worker))
                with suppress(OSError):  # a dead worker is seen when its answers are read
                    await worker.wire.send(job.frame)
        except asyncio.CancelledError:
            self._give_up(worker)
            raise

    async def _hear(self, worker: Worker) -> None:
        try:
            while worker.pending:
                answer = await worker.wire.receive()
                number = answer.get("number")
                if number not in list(worker.pending) or "outcome" not in answer:
                    raise Nonsense("sent an answer to nothing")
                job = worker.pending.pop(number)
                if job.alarm is not None:
                    job.alarm.cancel()
                if not job.outcome.done():
                    job.outcome.set_result(answer["outcome"])
            self._give()
        except OSError:
            self._lose(worker, None)
        except Nonsense as error:
            self._lose(worker, str(error))
        except asyncio.CancelledError:
            self._give_up(worker)
            raise

    def _give_up(self, worker: Worker) -> None:
        """The event loop ends in the middle of what is sent or answered."""
        if worker in self.workers:
            self.workers.remove(worker)
            worker.end()

    def _lose(self, worker: Worker, reason: str | None) -> None:
        """Ends a worker, the first time. What it was doing has failed, since it `reason`; None: it
        has ended by itself."""
        if worker in self.workers:
            self.workers.remove(worker)
            self._ending.add(worker)
            self._run(self._end(worker, reason))

    async def _end(self, worker: Worker, reason: str | None) -> None:
        tasks = [task for task in (worker.sending, worker.hearing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            if reason is None:
                how = await asyncio.to_thread(_how_it_ended, worker.process)
                reason = f"ended its process ({how})"
            await asyncio.to_thread(worker.end)
            self._ending.discard(worker)
        finally:  # whatever fails here, nobody waits for ever
            for job in worker.pending.values():
                if job.alarm is not None:
                    job.alarm.cancel()
                job.fail(WorkerLost(reason or "ended its process"))
        self._give()

    async def _start_missing(self) -> None:
        """Starts workers in the place of those that were lost."""
        missing = self.size - len(self.workers)
        try:
            started = await asyncio.to_thread(_start, self.command, missing)
            self.workers.extend(started)
        except (WorkerLost, ConfigError, OSError) as error:
            for job in self._waiting:
                job.fail(NoWorker(f"could not be started again: {error}"))
            self._waiting.clear()
        finally:
            self._starting = None
        self._give()


def _over(task: asyncio.Task[None] | None) -> bool:
    return task is None or task.done()


def _start(command: tuple[str, tuple[str, ...], bool], count: int) -> list[Worker]:
    """Workers that are ready. They are started together, then awaited."""
    started: list[Worker] = []
    try:
        for _ in range(count):
            started.append(_launch(*command))
        asyncio.run(_all_ready(started))
    except BaseException:
        for worker in started:
            worker.end()
        raise
    return started


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
        stdout=nowhere or 2,  # what `train --json` prints on stdout is the run's alone
        stderr=nowhere,
        start_new_session=True,  # Ctrl-C is ours to handle; and killpg reaches its children
    )
    theirs.close()
    return Worker(process, Wire(ours), mark)


async def _all_ready(workers: Sequence[Worker]) -> None:
    """Raises ConfigError when the function cannot be imported, WorkerLost when a process ends or
    is silent."""
    for worker in workers:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                told = await worker.wire.receive()
        except TimeoutError as error:
            late = f"its process was not ready within {START_TIMEOUT_S:g} s"
            raise WorkerLost(late) from error
        except Nonsense as error:
            raise WorkerLost(f"its process {error}") from error
        except OSError as error:
            how = _how_it_ended(worker.process)
            raise WorkerLost(f"its process ended at start ({how})") from error
        if "error" in told:
            raise ConfigError(told["error"])
        worker.told = told


def _how_it_ended(process: subprocess.Popen) -> str:
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=1.0)
        return f"signal {signal_name(-code)}" if code < 0 else f"exit code {code}"
    return "its connection closed"
