"""The process that calls a user's reward function: `python -m lora_moe_rl.rewards.worker FD SPEC
ARGS`.

It has a process of its own so that a hang can be ended and an `os._exit` or a memory bomb ends
nothing else. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from multiprocessing.connection import Connection

from lora_moe_rl.calls.child import end_me_first, raised, read_ahead, send
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.rewards.calling import Logged, Outcome, Reward, check


def main(argv: list[str]) -> None:
    connection, spec, args = Connection(int(argv[0])), argv[1], json.loads(argv[2])
    end_me_first()
    try:
        reward = Reward.load(spec, args)
    except ConfigError as error:
        send(connection, {"error": str(error)})
        return
    send(connection, {"async": reward.is_async, "by_sample": reward.by_sample})
    jobs = read_ahead(connection)
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
        outcome = [raised(error)] * num_samples
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
            reason = raised(error)
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
    told = {
        "outcome": outcome,
        "extra": logged.columns,
        "metrics": logged.metrics,
        "turns": logged.turns,
    }
    send(connection, {"number": number, "outcome": told})


if __name__ == "__main__":
    main(sys.argv[1:])
