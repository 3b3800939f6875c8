"""Processes that stay and do what they are asked: trainer ranks, engines, and single jobs.

    Processes       in each, an object is made whose methods are then called from here
    run_processes   one function in each of some processes
    apart           one function in a process of its own

What a process prints goes into its log; the last lines of that go into the error when it fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from lora_moe_rl.cluster.log import redirect
from lora_moe_rl.errors import ActorFailed, LoraMoeRlError

POLL_S = 0.2
LOG_LINES = 15
Variables = Mapping[str, str]
Outcome = tuple[Any, LoraMoeRlError | None, str | None]  # result, our error, traceback


def quickest() -> str:
    """How processes with a trainer are started: forked from a server that has imported Megatron
    once, where this machine has no GPU. Where it has one torch's optimizer asks for it, though all
    it has is on the CPU, and refuses a process that was forked after somebody counted GPUs."""
    import torch

    return "spawn" if torch.cuda.is_available() else "forkserver"


class Processes:
    """A context: the processes end with it.

    Process i makes an object by `make(i, *args)`, whose methods may be coroutines; its `shutdown`,
    where it has one, is called at the end. `names[i]` is how errors call it, and `variables[i]` are
    set in its environment. `start` is a start method of multiprocessing, see `quickest`.
    `grace_s`: how long a process may take to end. `as_raised`: a LoraMoeRlError is raised here as
    it is, and not within an ActorFailed.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[..., Any],
        *args: Any,
        start: str = "spawn",
        logs: Sequence[Path] | None = None,
        variables: Sequence[Variables] | None = None,
        grace_s: float = 5.0,
        as_raised: bool = True,
    ):
        self.names, self.grace_s, self.as_raised, self.lost = names, grace_s, as_raised, False
        self.folder = tempfile.TemporaryDirectory(prefix="lora-moe-rl-logs-")
        self.logs = logs or [Path(self.folder.name) / f"{i}.log" for i in range(len(names))]
        context: Any = multiprocessing.get_context(start)
        if start == "forkserver":
            context.set_forkserver_preload(["lora_moe_rl.verify.preload"])
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        for i, log in enumerate(self.logs):
            ours, theirs = context.Pipe()
            # A forked process has a copy of our end, too, which would keep the pipe open.
            copy = ours if start == "fork" else None
            settings = variables[i] if variables else {}
            arguments = (theirs, copy, log, settings, functools.partial(make, i, *args))
            process = context.Process(target=_serve, args=arguments)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(ours)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(0 if self.lost else self.grace_s)
            if process.is_alive():
                with contextlib.suppress(psutil.NoSuchProcess):
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                process.kill()
                process.join()
        self.folder.cleanup()

    def call(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """What a method of the object returns, in every process.

        Raises ActorFailed, with the traceback or the end of the log, when it raises in one of them,
        a process has ended, or there is no answer in time.
        """
        for i, connection in enumerate(self.connections):
            try:
                connection.send((method, args))
            except OSError:
                raise self._ended(i) from None
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while waiting := [i for i in range(len(self.names)) if i not in answers]:
            wait([self.connections[i] for i in waiting], POLL_S)
            for i in waiting:
                alive = self.processes[i].is_alive()  # first: it may answer and then end
                if self.connections[i].poll():
                    answers[i] = self._answer(i)
                elif not alive:
                    raise self._ended(i)
            if time.monotonic() > deadline and len(answers) < len(self.names):
                reason = f"{method}: no answer within {timeout_s:.0f} s"
                raise self._failed(waiting[0], reason)
        return [answers[i] for i in range(len(self.names))]

    def _answer(self, i: int) -> Any:
        try:
            answer, error, trace = self.connections[i].recv()
        except (OSError, EOFError):
            raise self._ended(i) from None
        if error is not None and self.as_raised:
            raise error
        if trace is not None:
            self.lost = len(self.names) > 1  # the others may wait for it for ever
            raise ActorFailed(self.names[i], trace.strip().splitlines()[-1], trace)
        return answer

    def _ended(self, i: int) -> ActorFailed:
        self.processes[i].join(self.grace_s)
        return self._failed(i, f"its process ended with exit code {self.processes[i].exitcode}")

    def _failed(self, i: int, reason: str) -> ActorFailed:
        self.lost = True
        log = self.logs[i]
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        return ActorFailed(self.names[i], reason, "\n".join(lines[-LOG_LINES:]))


def _serve(
    connection: Connection,
    copy: Connection | None,
    log: Path,
    variables: Variables,
    make: Callable[[], Any],
) -> None:
    """The process: answers one call after the other, until the connection is closed."""
    if copy is not None:
        copy.close()
    redirect(log)
    os.environ.update(variables)
    target, runner = None, asyncio.Runner()  # one loop for all calls

    def call() -> Any:
        nonlocal target
        target = make() if target is None else target
        return getattr(target, method)(*args)

    while True:
        try:
            method, args = connection.recv()
        except (EOFError, OSError):
            break
        connection.send(_outcome(call, runner))
    if hasattr(target, "shutdown"):
        _outcome(target.shutdown, runner)
    runner.close()


def _outcome(call: Callable[[], Any], runner: asyncio.Runner) -> Outcome:
    try:
        found = call()
        return runner.run(found) if inspect.iscoroutine(found) else found, None, None
    except BaseException as error:
        traceback.print_exc()  # into the log
        ours = error if isinstance(error, LoraMoeRlError) else None
        return None, ours, traceback.format_exc()


class _Once:
    """A function as an object of `Processes`."""

    def __init__(self, i: int, function: Callable[..., Any]):
        self.function = function

    def run(self, *args: Any) -> Any:
        return self.function(*args)


class _OnceOfMany(_Once):
    """A function that is also told which process it is in. The process ends without waiting for
    threads: gloo's would wait for ranks that have ended."""

    def __init__(self, i: int, function: Callable[..., Any]):
        super().__init__(i, functools.partial(function, i))

    def shutdown(self) -> None:
        os._exit(0)


def run_processes(
    size: int, function: Callable[..., Any], *args: Any, timeout_s: float
) -> list[Any]:
    """`function(rank, *args)` in `size` processes on the CPU. Raises ActorFailed when a process
    raises, dies, or does not answer within `timeout_s`; the others are ended then."""
    names = [f"rank {rank}" for rank in range(size)]
    make = (_OnceOfMany, function)
    with Processes(names, *make, start=quickest(), as_raised=False) as processes:
        return processes.call("run", *args, timeout_s=timeout_s)


def apart(
    name: str, job: Callable[..., Any], *args: Any, timeout_s: float, start: str = "spawn"
) -> Any:
    """`job(*args)` in a process of its own: this one may hold Megatron, whose mends vLLM must not
    see. Raises what `Processes.call` does."""
    with Processes([name], _Once, job, start=start, grace_s=20.0) as process:
        return process.call("run", *args, timeout_s=timeout_s)[0]
