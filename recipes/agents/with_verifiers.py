"""A task of a verifiers taskset, played by verifiers itself: its harness, its tools, its rewards.

    with_verifiers.py TASKSET [JSON]     the id of an installed taskset, and settings of its
                                         environment, as {"taskset": {"num_tasks": 5}}

The row's column `task` is the task's number, so that all trajectories of a group play the same
(lora_moe_rl.data.generators:numbered). Who answers is the run's policy, by OPENAI_BASE_URL and
OPENAI_API_KEY. It runs in an environment of its own (`make agents-verifiers`), a process for each
trajectory.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import openai
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

# Chats, and calls the taskset's tools; on this machine. Others, as a container: in JSON.
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def main(taskset: str, settings: str = "{}") -> None:
    # The harness starts its program by uv, which stands beside this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    given = json.loads(settings)
    given = {"agent": AGENT} | given | {"taskset": given.get("taskset", {}) | {"id": taskset}}
    client = openai.OpenAI()
    row: Any = client.get("/task", cast_to=object)
    reward = asyncio.run(play(given, row["row"]["task"]))
    client.post("/reward", body={"reward": reward}, cast_to=object)


async def play(settings: dict, number: int) -> float:
    """The reward of the task of this number; a finite taskset begins anew after its last."""
    environment = load_environment(resolve_env_config(settings))
    tasks = list(islice(environment.taskset.load(), number + 1))
    endpoint = EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    async with environment.serving():
        episode = await environment.run_episode(
            tasks[number % len(tasks)], ModelContext("policy", endpoint)
        )
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise SystemExit(" ".join(f"{error.type}: {error.message}" for error in errors))
    return sum(trace.reward for trace in episode.traces)


if __name__ == "__main__":
    main(*sys.argv[1:])
