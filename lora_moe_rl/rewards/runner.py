"""Calls the user's reward function for all samples of a step, in processes that may be lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import psutil

from lora_moe_rl.data.samples import Prompt, Sample
from lora_moe_rl.errors import ConfigError

NUM_WORKERS = 2
START_TIMEOUT_S = 120.0  # of a worker: it imports what the user's file imports
# An async function ends a late prompt itself; only when it blocks its loop is it ended from here.
ASYNC_GRACE_S = 5.0
# In the environment of a worker, and so of all that it starts: by it they are found again.
MARK = "LORA_MOE_RL_REWARD_WORKER"

Group = tuple[int, dict[str, Any]]


class WorkerLost(Exception):
    """A worker could not start, or ended; the message says how."""


@dataclass(eq=False)
class Worker:
    """One process, and the groups it has been given and has not answered."""

    process: subprocess.Popen
    connection: Connection
    mark: str
    is_async: bool = False
    pending: deque[Group] = field(default_factory=deque)
    deadline: float = 0.0  # time.monotonic() by which the next answer is due

    def give(self, groups: list[Group], timeout_s: float) -> None:
        self.pending = deque(groups)
        self.wait_again(timeout_s)
        if groups:
            with suppress(OSError):  # a dead worker is seen when its answers are read
                self.connection.send((groups, timeout_s))

    def wait_again(self, timeout_s: float) -> None:
        self.deadline = time.monotonic() + timeout_s + (ASYNC_GRACE_S if self.is_async else 0.0)

    def end(self) -> None:
        """End the process and whatever it started, also what is in a session of its own or has
        outlived its parent. Harmless the second time."""
        if self.connection.closed:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        while started := _marked(self.mark):  # again: one may have started another meanwhile
            for process in started:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(started, timeout=1.0)
        self.connection.close()


class RewardRunner:
    """Rewards of a step. Use it as a context manager, or call `close`.

    A prompt's samples are scored by one call. A call that raises, takes longer than `timeout_s`,
    ends the process or returns anything but one finite number (or None) for each sample has failed:
    its samples get NaN, never 0, and a line in the failures.

    Raises ConfigError when the function cannot be imported.
    """

    def __init__(self, function: str, timeout_s: float):
        self.function, self.timeout_s = function, timeout_s
        self._workers: list[Worker] = []
        try:
            self._start_missing()
        except WorkerLost as error:
            raise ConfigError(f"reward.function={function}: {error}") from error

    def score(self, prompts: list[Prompt], samples: list[Sample]) -> tuple[np.ndarray, list[str]]:
        """Rewards, float32 in the order of `samples`, and one line for each sample that failed.

        NaN stands for a failure and for None ("does not apply"), which is no failure. A sample's
        `group` is the index of its prompt.
        """
        rewards = np.full(len(samples), np.nan, dtype=np.float32)
        failures: list[str] = []
        members: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            members.setdefault(sample.group, []).append(index)
        groups = [
            (group, _arguments(prompts[group], [samples[index] for index in indices]))
            for group, indices in members.items()
        ]
        for group, outcome in self._run(groups):
            for index, value in zip(members[group], outcome, strict=True):
                if isinstance(value, str):
                    failures.append(f"prompt {prompts[group].row}: {self.function} {value}")
                elif value is not None:
                    rewards[index] = value
        return rewards, failures

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _start_missing(self) -> None:
        """Bring the workers to their number. They are started together, then awaited."""
        started = [_launch(self.function) for _ in range(NUM_WORKERS - len(self._workers))]
        try:
            for worker in started:
                self._workers.append(_await_ready(worker))
        except (WorkerLost, ConfigError):
            for worker in {*started, *self._workers}:
                worker.end()
            self._workers = []
            raise

    def _run(self, groups: list[Group]):
        """Yields (group, outcome) as they come, exactly one for each group."""
        try:
            self._start_missing()  # those that could not be replaced in an earlier step
        except (WorkerLost, ConfigError) as error:
            yield from ((group, _failed(arguments, str(error))) for group, arguments in groups)
            return
        for number, worker in enumerate(self._workers):
            worker.give(groups[number :: len(self._workers)], self.timeout_s)
        while busy := [worker for worker in self._workers if worker.pending]:
            patience = min(worker.deadline for worker in busy) - time.monotonic()
            ready = wait([worker.connection for worker in busy], max(0.0, patience))
            for worker in busy:
                if worker.connection in ready:
                    yield from self._read(worker)
                elif time.monotonic() > worker.deadline:
                    yield from self._replace(
                        worker, f"took longer than reward.timeout_s={self.timeout_s:g}"
                    )

    def _read(self, worker: Worker):
        try:
            message = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            yield from self._replace(worker, f"ended its process ({_how_it_ended(worker.process)})")
            return
        worker.pending = deque(item for item in worker.pending if item[0] != message["group"])
        worker.wait_again(self.timeout_s)
        yield message["group"], message["outcome"]

    def _replace(self, worker: Worker, reason: str):
        """End a worker. What it was doing has failed; a new one gets what it had yet to do."""
        worker.end()
        # A plain function does one prompt after the other; an async one all at the same time, so
        # that any of them may be to blame.
        count = len(worker.pending) if worker.is_async else 1
        failed = [worker.pending.popleft() for _ in range(count)]
        self._workers.remove(worker)
        yield from ((group, _failed(arguments, reason)) for group, arguments in failed)
        new = _launch(self.function)
        try:
            _await_ready(new)
        except (WorkerLost, ConfigError) as error:
            new.end()
            reason = f"could not be started again: {error}"
            yield from ((group, _failed(arguments, reason)) for group, arguments in worker.pending)
        else:
            self._workers.append(new)
            new.give(list(worker.pending), self.timeout_s)


def _arguments(prompt: Prompt, samples: list[Sample]) -> dict[str, Any]:
    """What a worker needs to call the function for one prompt."""
    texts: list[Any] = [sample.text for sample in samples]
    if not isinstance(prompt.text, str):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    return {
        "prompt": prompt.text,
        "completions": texts,
        "completion_ids": [sample.response_ids.tolist() for sample in samples],
        "columns": prompt.columns,
    }


def _failed(arguments: dict[str, Any], reason: str) -> list[str]:
    return [reason] * len(arguments["completions"])


def _launch(function: str) -> Worker:
    """A worker process. Not multiprocessing's: that would import the main script again."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "lora_moe_rl.rewards.worker", str(theirs.fileno()), function],
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


def _marked(mark: str) -> list[psutil.Process]:
    """Processes that have a worker's mark in their environment, and still run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            ours = process.environ().get(MARK) == mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _how_it_ended(process: subprocess.Popen) -> str:
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(timeout=1.0)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return "its connection closed"
