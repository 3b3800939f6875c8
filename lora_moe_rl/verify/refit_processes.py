"""The two sides of `verify refit`, as processes that stay and do what they are asked.

    Ranks           trainer ranks of one layout, each with a connection: `call` asks all of them
    EngineProcess   one vLLM engine, in a process of its own

Calls are one at a time; an error on the other side is raised here.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ActorFailed, LoraMoeRlError
from lora_moe_rl.rollout.merged import MergedRolloutEngine
from lora_moe_rl.verify.ranks import LOG_LINES, run_ranks

POLL_S = 0.2
END_S = 60  # longest wait for an engine that is to end


class Ranks:
    """A context: the ranks end with it."""

    def __init__(self, config: RunConfig, model_dir: Path, cuda: bool, timeout_s: float):
        pairs = [multiprocessing.Pipe() for _ in range(config.trainer.world_size)]
        self.connections = [ours for ours, _ in pairs]
        self.failure: BaseException | None = None
        arguments = (config, model_dir, _serve_rank, [theirs for _, theirs in pairs])
        settings = {"cuda": cuda, "timeout_s": timeout_s}
        self.thread = threading.Thread(target=self._run, args=(arguments, settings), daemon=True)

    def _run(self, arguments: tuple, settings: dict[str, Any]) -> None:
        try:
            run_ranks(*arguments, **settings)
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Ranks:
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        for connection in self.connections:
            connection.close()  # a rank that waits for a call ends by itself
        self.thread.join()

    def call(self, method: str, *args: Any) -> list[Any]:
        """What a method of the job returns, of each rank. Raises ActorFailed when one fails."""
        try:
            for connection in self.connections:
                connection.send((method, args))
            return [self._answer(connection) for connection in self.connections]
        except (OSError, EOFError):  # a rank has ended
            raise self._failed() from None

    def _answer(self, connection: Connection) -> Any:
        while not connection.poll(POLL_S):
            if not self.thread.is_alive():
                raise self._failed()
        return connection.recv()

    def _failed(self) -> BaseException:
        self.thread.join()
        return self.failure or ActorFailed("trainer ranks", "they ended")


def _serve_rank(worker, spec: AdapterSpec, connections: Sequence[Connection]) -> None:
    """A rank's job: does what its connection asks, until that is closed."""
    from lora_moe_rl.verify.refit_jobs import RankJob

    mine, job = connections[worker.rank], RankJob(worker, spec)
    while True:
        try:
            method, args = mine.recv()
        except EOFError:
            return
        mine.send(getattr(job, method)(*args))


class EngineProcess:
    """A context: vLLM's processes end with it."""

    def __init__(self, config: RunConfig, spec: AdapterSpec, model_dir: Path, log: Path):
        self.log, self.start_timeout_s = log, config.rollout.start_timeout_s
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = (theirs, config, spec, str(model_dir), str(log))
        self.process = context.Process(target=_engine_process, args=arguments)

    def __enter__(self) -> EngineProcess:
        self.process.start()
        return self

    def __exit__(self, *_) -> None:
        self.connection.close()
        self.process.join(END_S)
        if self.process.is_alive():
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
            self.process.kill()
            self.process.join()

    def start(self) -> dict[str, Any]:
        return self.call("start", timeout_s=self.start_timeout_s)

    def call(self, method: str, *args: Any, timeout_s: float = 600) -> Any:
        """What a coroutine of the engine returns. Raises what it raises; ActorFailed when the
        process has ended or does not answer in time."""
        deadline = time.monotonic() + timeout_s
        try:
            self.connection.send((method, args))
            while not self.connection.poll(POLL_S):
                if time.monotonic() > deadline:
                    raise self._failed(f"{method}: no answer within {timeout_s:.0f} s")
                if not self.process.is_alive():
                    raise EOFError
            answer, error = self.connection.recv()
        except (OSError, EOFError):
            raise self._failed("its process has ended") from None
        if isinstance(error, LoraMoeRlError):
            raise error
        if error is not None:
            raise self._failed(error)
        return answer

    def _failed(self, reason: str) -> ActorFailed:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
        return ActorFailed("engine", reason, "\n".join(lines[-LOG_LINES:]))


def _engine_process(connection: Connection, config, spec, model_dir: str, log: str) -> None:
    asyncio.run(_serve_engine(connection, config, spec, model_dir, log))


async def _serve_engine(connection: Connection, config, spec, model_dir: str, log: str) -> None:
    from lora_moe_rl.verify.refit_jobs import VerifiedEngine

    engine_class = MergedRolloutEngine if config.refit.mode == "merged" else VerifiedEngine
    engine = engine_class(config, model_dir, spec, 0, log)
    try:
        while True:
            try:
                method, args = await asyncio.to_thread(connection.recv)
            except (EOFError, OSError):
                return
            try:
                answer: Any = (await getattr(engine, method)(*args), None)
            except LoraMoeRlError as error:
                answer = (None, error)
            except Exception as error:
                traceback.print_exc()  # into the log
                answer = (None, f"{method}: {type(error).__name__}: {error}")
            connection.send(answer)
    finally:
        if hasattr(engine, "llm"):
            await engine.shutdown()
