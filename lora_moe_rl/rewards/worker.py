"""The process that calls a user's reward function: `python -m lora_moe_rl.rewards.worker FD SPEC`.

It has a process of its own so that a hang can be ended and an `os._exit` or a memory bomb ends
nothing else. It takes pickles from its parent and answers in JSON, since what the parent reads may
have been written by the user's code. Imports no torch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import queue
import signal
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.importing import load_function

Outcome = list[float | str | None]  # a reward, None: not applicable, or why there is none


def main(argv: list[str]) -> None:
    connection, spec = Connection(int(argv[0])), argv[1]
    # When memory runs out, the kernel is to end this process and no other.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    try:
        function = load_function(spec)
        keywords = accepted_keywords(function)
    except ConfigError as error:
        _send(connection, {"error": str(error)})
        return
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    _send(connection, {"async": is_async})
    jobs = _read_ahead(connection)
    if is_async:
        asyncio.run(_serve(function, keywords, jobs, connection))
    while True:
        number, arguments, _ = jobs.get()  # the parent ends a plain function that is late
        _send(connection, {"group": number, "outcome": _score(function, keywords, arguments)})


def accepted_keywords(function: Callable) -> frozenset[str] | None:
    """The names of the function's parameters, or None if it takes any keyword."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )


def expand(arguments: dict[str, Any], keywords: frozenset[str] | None) -> dict[str, list]:
    """The keywords of one call: `columns` hold a value a prompt, the function gets one a sample."""
    num_samples = len(arguments["completions"])
    values = {key: [value] * num_samples for key, value in arguments["columns"].items()}
    values["prompts"] = [arguments["prompt"]] * num_samples
    values["completions"] = arguments["completions"]
    values["completion_ids"] = arguments["completion_ids"]
    return {key: value for key, value in values.items() if keywords is None or key in keywords}


def check(returned: Any, num_samples: int) -> Outcome:
    """Makes plain what a function returned: every value a float that is finite in float32 (in which
    rewards are kept), None, or what is wrong."""
    try:
        values = list(returned)
    except TypeError:
        return [f"returned {_short(returned)}, not a list of rewards"] * num_samples
    if isinstance(returned, str | bytes | dict) or len(values) != num_samples:
        return [
            f"returned {_short(returned)} for {num_samples} samples, not one reward for each"
        ] * num_samples
    return [_check_value(value) for value in values]


def _check_value(value: Any) -> float | str | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
        struct.pack("<f", number)  # OverflowError beyond the range of float32
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    return f"returned {_short(value)}, not a finite number in float32"


def _score(function: Callable, keywords: frozenset[str] | None, arguments: dict) -> Outcome:
    num_samples = len(arguments["completions"])
    try:
        return check(function(**expand(arguments, keywords)), num_samples)
    # Not only Exception: math-verify's timeout is a BaseException, and sys.exit() may be called.
    except BaseException as error:
        return [f"raised {_short(error)}"] * num_samples


async def _serve(function, keywords, jobs: queue.SimpleQueue, connection: Connection) -> None:
    """Calls an async function for all prompts at once, and answers each when it is done."""

    async def score(number: int, arguments: dict, timeout_s: float) -> None:
        num_samples = len(arguments["completions"])
        try:
            call = function(**expand(arguments, keywords))
            outcome = check(await asyncio.wait_for(call, timeout_s), num_samples)
        except TimeoutError:
            outcome = [f"took longer than reward.timeout_s={timeout_s:g}"] * num_samples
        except BaseException as error:
            outcome = [f"raised {_short(error)}"] * num_samples
        _send(connection, {"group": number, "outcome": outcome})

    running = set()  # the event loop itself holds tasks weakly
    while True:
        task = asyncio.create_task(score(*await asyncio.to_thread(jobs.get)))
        running.add(task)
        task.add_done_callback(running.discard)


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


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 200 else text[:200] + "..."


if __name__ == "__main__":
    main(sys.argv[1:])
