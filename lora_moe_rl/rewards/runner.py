"""Calls the user's reward function for each group as it finishes, in processes that may be lost."""

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

import numpy as np

from lora_moe_rl.cluster.watchdog import kill_marked
from lora_moe_rl.config import RewardFunction
from lora_moe_rl.data.samples import Details, Prompt, Sample, Scores
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rewards.calling import Outcome

# Of a plain function. An async one does all its prompts at the same time, in one process: so a
# limit that it keeps (as many requests as a judge may get) is the run's.
NUM_WORKERS = 2
START_TIMEOUT_S = 120.0  # of a worker: it imports what the user's file imports
# An async function ends a late prompt itself; only when it blocks its loop is it ended from here.
ASYNC_GRACE_S = 5.0
# In the environment of a worker, and so of all that it starts: by it they are found again.
MARK = "LORA_MOE_RL_REWARD_WORKER"


class WorkerLost(Exception):
    """Raised when a worker could not start, or ended; the message says how."""


@dataclass(frozen=True)
class Answer:
    """What a worker answers for one prompt: `outcome`, and what the function has logged."""

    outcome: Outcome
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)


@dataclass(eq=False)
class Job:
    """One call of the function, for one prompt."""

    number: int
    arguments: dict[str, Any]
    answer: asyncio.Future[Answer]

    def fail(self, reason: str) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer([reason] * len(self.arguments["completions"])))


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


class RewardRunner:
    """Rewards of groups, as they come. Use it as a context manager, or call `close`.

    A prompt's samples are scored by one call. A call that raises, takes longer than `timeout_s`,
    ends the process or returns anything but one finite number (or None) for each sample has failed:
    its samples get NaN, never 0, and a line in the failures.

    `max_steps`: optimizer steps of the run, which functions are told. Raises ConfigError when the
    function cannot be imported, or does not take its arguments.
    """

    def __init__(self, reward: RewardFunction, timeout_s: float, max_steps: int):
        assert reward.function is not None
        self.reward, self.timeout_s, self.max_steps = reward, timeout_s, max_steps
        self.function = reward.function
        self._numbers = itertools.count()
        self._workers: list[Worker] = []
        self._starting: asyncio.Task[None] | None = None
        self._giving: set[asyncio.Task[None]] = set()  # of jobs whose worker was lost
        try:
            self._workers = _start(reward, NUM_WORKERS)
        except (WorkerLost, ConfigError) as error:
            raise ConfigError(f"{reward.key}={self.function}: {error}") from error
        self._wanted = 1 if self._workers[0].is_async else NUM_WORKERS
        while len(self._workers) > self._wanted:
            self._workers.pop().end()

    async def score(self, prompt: Prompt, samples: Sequence[Sample]) -> Scores:
        """Rewards of a prompt's samples, float32 [n], and one line for each sample that failed.

        NaN stands for a failure and for None ("does not apply"), which is no failure.
        """
        waiting = asyncio.get_running_loop().create_future()
        job = Job(next(self._numbers), self._arguments(prompt, samples), waiting)
        await self._give([job])
        answer = await job.answer
        rewards = np.full(len(samples), np.nan, dtype=np.float32)
        reasons: dict[int, str] = {}
        for index, value in enumerate(answer.outcome):
            if isinstance(value, str):
                reasons[index] = f"prompt {prompt.row}: {self.function} {value}"
            elif value is not None:
                rewards[index] = value
        details = Details(reasons=reasons, extra=answer.extra, metrics=answer.metrics)
        return Scores(rewards, list(reasons.values()), details)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _arguments(self, prompt: Prompt, samples: Sequence[Sample]) -> dict[str, Any]:
        """What a worker needs to call the function for one prompt."""
        texts: list[Any] = [sample.text for sample in samples]
        if not isinstance(prompt.text, str):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        versions = [int(version) for sample in samples for version in sample.versions]
        return {
            "prompt": prompt.text,
            "completions": texts,
            "completion_ids": [sample.response_ids.tolist() for sample in samples],
            "columns": prompt.columns,
            # Each optimizer step makes an adapter version.
            "trainer_state": {
                "global_step": max(versions, default=0),
                "max_steps": self.max_steps,
            },
        }

    async def _give(self, jobs: Sequence[Job]) -> None:
        """Gives jobs to the workers that have least to do; missing workers are started first."""
        try:
            await self._start_missing()
        except (WorkerLost, ConfigError) as error:
            for job in jobs:
                job.fail(f"could not be started again: {error}")
            return
        loop = asyncio.get_running_loop()
        for job in jobs:
            worker = min(self._workers, key=lambda worker: len(worker.pending))
            worker.pending[job.number] = job
            loop.add_reader(worker.connection.fileno(), self._read, worker)
            with suppress(OSError):  # a dead worker is seen when its answers are read
                worker.connection.send((job.number, job.arguments, self.timeout_s))
            self._set_alarms(worker)

    async def _start_missing(self) -> None:
        """Starts the workers that could not be replaced before. All that wait for them share one
        start."""
        while len(self._workers) < self._wanted:
            if self._starting is None:
                self._starting = asyncio.create_task(self._start_in_thread())
            starting = self._starting
            try:
                await asyncio.shield(starting)
            finally:
                if self._starting is starting:
                    self._starting = None

    async def _start_in_thread(self) -> None:
        missing = self._wanted - len(self._workers)
        self._workers += await asyncio.to_thread(_start, self.reward, missing)

    def _set_alarms(self, worker: Worker) -> None:
        """Sets a timer for each job that a worker is doing now: all that it has been given if its
        function is async, else the first."""
        # An async function ends a late prompt itself; only when it blocks its loop is it ended from
        # here.
        patience = self.timeout_s + (ASYNC_GRACE_S if worker.is_async else 0.0)
        doing = list(worker.pending) if worker.is_async else list(worker.pending)[:1]
        for number in doing:
            if number not in worker.alarms:
                reason = f"took longer than reward.timeout_s={self.timeout_s:g}"
                loop = asyncio.get_running_loop()
                worker.alarms[number] = loop.call_later(patience, self._lost, worker, reason)

    def _read(self, worker: Worker) -> None:
        """Called by the event loop when a worker has answered, or has ended."""
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            self._lost(worker, f"ended its process ({_how_it_ended(worker.process)})")
            return
        job = worker.pending.pop(message["group"], None)
        if alarm := worker.alarms.pop(message["group"], None):
            alarm.cancel()
        self._set_alarms(worker)
        if job is not None and not job.answer.done():
            told = (message[name] for name in ("outcome", "extra", "metrics"))
            job.answer.set_result(Answer(*told))

    def _lost(self, worker: Worker, reason: str) -> None:
        """Ends a worker. What it was doing has failed; others get what it had yet to do."""
        asyncio.get_running_loop().remove_reader(worker.connection.fileno())
        worker.end()
        self._workers.remove(worker)
        jobs = list(worker.pending.values())
        # Of an async function any of those that run may be to blame.
        count = len(jobs) if worker.is_async else 1
        for job in jobs[:count]:
            job.fail(reason)
        if rest := jobs[count:]:
            task = asyncio.create_task(self._give(rest))
            self._giving.add(task)
            task.add_done_callback(self._giving.discard)


def _start(reward: RewardFunction, count: int) -> list[Worker]:
    """Workers that are ready. They are started together, then awaited."""
    started = [_launch(reward) for _ in range(count)]
    try:
        return [_await_ready(worker) for worker in started]
    except (WorkerLost, ConfigError):
        for worker in started:
            worker.end()
        raise


def _launch(reward: RewardFunction) -> Worker:
    """A worker process. Not multiprocessing's: that would import the main script again."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    mark = uuid.uuid4().hex
    what = [str(theirs.fileno()), str(reward.function), json.dumps(reward.args)]
    process = subprocess.Popen(
        [sys.executable, "-m", "lora_moe_rl.rewards.worker", *what],
        pass_fds=(theirs.fileno(),),
        env={**os.environ, "PYTHONPATH": path, MARK: mark},
        stdin=subprocess.DEVNULL,
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
