"""The process that calls a user's reward function: `python -m lora_moe_rl.rewards.worker FD SPEC
ARGS`.

It has a process of its own so that a hang can be ended and an `os._exit` or a memory bomb ends
nothing else. It takes pickles from its parent and answers in JSON, since what the parent reads may
have been written by the user's code. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rewards.calling import Logged, Outcome, Reward, check, short


def main(argv: list[str]) -> None:
    connection, spec, args = Connection(int(argv[0])), argv[1], json.loads(argv[2])
    # When memory runs out, the kernel is to end this process and no other.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    try:
        reward = Reward.load(spec, args)
    except ConfigError as error:
        _send(connection, {"error": str(error)})
        return
    _send(connection, {"async": reward.is_async})
    jobs = _read_ahead(connection)
    if reward.is_async:
        asyncio.run(_serve(reward, jobs, connection))
    while True:
        number, arguments, _ = jobs.get()  # the parent ends a plain function that is late
        _score(reward, number, arguments, connection)


def _score(reward: Reward, number: int, arguments: dict, connection: Connection) -> None:
    num_samples = len(arguments["completions"])
    logged = Logged(num_samples)
    outcome: Outcome
    try:
        outcome = check(reward.call(arguments, logged), num_samples)
    # Not only Exception: math-verify's timeout is a BaseException, and sys.exit() may be called.
    except BaseException as error:
        outcome = [f"raised {short(error)}"] * num_samples
    _answer(connection, number, outcome, logged)


async def _serve(reward: Reward, jobs: queue.SimpleQueue, connection: Connection) -> None:
    """Calls an async function for all prompts at once, and answers each when it is done."""

    async def score(number: int, arguments: dict, timeout_s: float) -> None:
        num_samples = len(arguments["completions"])
        logged, limit = Logged(num_samples), asyncio.timeout(timeout_s)
        outcome: Outcome
        try:
            async with limit:
                returned = await reward.call(arguments, logged)
            outcome = check(returned, num_samples)
        except BaseException as error:
            reason = f"raised {short(error)}"
            if isinstance(error, TimeoutError) and limit.expired():
                reason = f"took longer than reward.timeout_s={timeout_s:g}"
            outcome = [reason] * num_samples
        _answer(connection, number, outcome, logged)

    running = set()  # the event loop itself holds tasks weakly
    while True:
        task = asyncio.create_task(score(*await asyncio.to_thread(jobs.get)))
        running.add(task)
        task.add_done_callback(running.discard)


def _answer(connection: Connection, number: int, outcome: Outcome, logged: Logged) -> None:
    told = {"outcome": outcome, "extra": logged.columns, "metrics": logged.metrics}
    _send(connection, {"group": number, **told})


def _read_ahead(connection: Connection) -> queue.SimpleQueue:
    """A queue of jobs as they come. A thread reads them, so that the end of the parent ends this
    process even while the user's code runs, and with it what that has started."""
    jobs: queue.SimpleQueue = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                jobs.put(connection.recv())
            except (EOFError, OSError):
                os.killpg(0, signal.SIGKILL)  # its own group: the parent made it one

    threading.Thread(target=read, daemon=True).start()
    return jobs


def _send(connection: Connection, message: dict) -> None:
    connection.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
