"""`lora-moe-rl bench agents`: trajectories of many turns by the endpoint, and by `vllm serve`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lora_moe_rl.bench import report
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.verify.report import table

ABOUT = """\
Agents of 8 turns, each of which reads the answer of a trivial tool, ask a tiny model with an
adapter for chats: by `lora-moe-rl serve`, which keeps every token and every route of them, and by
vLLM's own OpenAI server, in turns on one machine, by the same client. A trajectory has the same
numbers of tokens with both, or nothing is reported.
"""
TURNS, SAID, TOLD = 8, 32, 24  # tokens that the policy says in a turn, and that the tool answers
TRAJECTORIES, AT_ONCE, ROUNDS = 256, 32, 4
OUTSIDE, RATIO = 0.10, 0.9
ANSWER_S = 600.0
OURS, THEIRS = "endpoint", "vllm serve"


class Spent(NamedTuple):
    """What one trajectory took: tokens of (the prompt, the answer) of each turn, as the server
    counts them, and seconds."""

    tokens: list[tuple[int, int]]
    seconds: float


class Asked(NamedTuple):
    """A server as the client asks it; `sessions`: each trajectory has one."""

    root: str
    model: str
    sessions: bool


class Round(NamedTuple):
    spent: list[Spent]
    seconds: float  # of them all, some at a time


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    busy = busy_cores()
    with temporary() as folder:
        rounds, counts = asyncio.run(measure(Path(folder), options))
    result = {
        "trajectories": options.trajectories,
        "at_once": options.at_once,
        "rounds": options.rounds,
        "cores": cores(),
        "busy_cores_before": busy,
        **figures(rounds, counts),
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


async def measure(
    folder: Path, options: Any
) -> tuple[dict[str, list[Round]], dict[str, dict[str, float]]]:
    """Rounds of both, and what each has counted in them. Raises BenchmarkError when a trajectory
    has other tokens with one than with the other."""
    import ray

    from lora_moe_rl.bench import agents_servers as servers
    from lora_moe_rl.cluster.ray_start import prepare_ray, start_ray
    from lora_moe_rl.verify.serving import ADAPTER

    spec = servers.save_model(folder / "model")
    config = servers.config_of(folder / "model")
    prepare_ray()
    start_ray(1)
    try:
        engine: Any = ray.remote(num_cpus=1)(servers.CountingEngine).remote(
            config, config.model.path, spec, 0, str(folder / "engine.log")
        )
        facts = await engine.start.remote()
        root = await engine.listen.remote(servers.adapter_of(spec), facts["dtype"])
        with servers.vllm_server(folder / "model", folder / "adapter", spec, config) as vllm:
            asked = {
                OURS: Asked(root, "policy", True),
                THEIRS: Asked(vllm.root, ADAPTER, False),
            }
            return await _rounds(asked, engine, options)
    finally:
        ray.shutdown()


async def _rounds(
    asked: dict[str, Asked], engine: Any, options: Any
) -> tuple[dict[str, list[Round]], dict[str, dict[str, float]]]:
    from lora_moe_rl.bench.agents_servers import counts_of_server

    async def counted() -> dict[str, dict[str, float]]:
        theirs = await asyncio.to_thread(counts_of_server, asked[THEIRS].root)
        return {OURS: await engine.counted.remote(), THEIRS: theirs}

    for one in asked.values():  # to warm up
        await played(one, range(-options.at_once, 0), options.at_once)
    before = await counted()
    rounds: dict[str, list[Round]] = {name: [] for name in asked}
    for number, tasks in enumerate(tasks_of_rounds(options.trajectories, options.rounds)):
        for name in list(asked)[:: 1 if number % 2 else -1]:
            rounds[name].append(await played(asked[name], tasks, options.at_once))
    after = await counted()
    check(rounds, after[OURS]["forks"])
    return rounds, {
        name: {key: value - before[name].get(key, 0) for key, value in found.items()}
        for name, found in after.items()
    }


def tasks_of_rounds(trajectories: int, rounds: int) -> list[range]:
    """Rounds of as equal numbers as there are, none of them empty."""
    rounds = min(rounds, trajectories)
    ends = [trajectories * (i + 1) // rounds for i in range(rounds)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


async def played(asked: Asked, tasks: Sequence[int], at_once: int) -> Round:
    """A trajectory of each task."""
    import openai

    room = asyncio.Semaphore(at_once)
    how: Any = {"api_key": "none", "max_retries": 0, "timeout": ANSWER_S}
    async with openai.AsyncOpenAI(base_url=f"{asked.root}/v1", **how) as client:

        async def one(task: int) -> Spent:
            async with room:
                return await trajectory(client, asked, task)

        started = time.perf_counter()
        spent = await asyncio.gather(*map(one, tasks))
        return Round(spent, time.perf_counter() - started)


async def trajectory(client: Any, asked: Asked, task: int) -> Spent:
    started, tokens = time.perf_counter(), []
    if asked.sessions:
        opened = await client.post("/sessions", body={}, cast_to=object)
        client = client.with_options(api_key=opened["api_key"])
    messages = [{"role": "user", "content": f"This is task {task:06d}. " + "Go on. " * 20}]
    for _ in range(TURNS):
        answer = await client.chat.completions.create(
            model=asked.model, messages=messages, max_tokens=SAID, temperature=1.0
        )
        said, used = answer.choices[0].message.content or "", answer.usage
        tokens.append((used.prompt_tokens, used.completion_tokens))
        messages.append({"role": "assistant", "content": said})
        messages.append({"role": "tool", "tool_call_id": "call", "content": tool(said)})
    if asked.sessions:
        await client.delete("/session", cast_to=object)
    return Spent(tokens, time.perf_counter() - started)


def tool(said: str) -> str:
    """How many letters there are, in as many tokens each time."""
    return f"{sum(map(str.isalpha, said))} are letters".rjust(TOLD)


def check(rounds: dict[str, list[Round]], forks: float) -> None:
    """Raises BenchmarkError when the work was not the same, or no chat went on."""
    ours, theirs = ([[one.tokens for one in r.spent] for r in rounds[n]] for n in (OURS, THEIRS))
    if ours != theirs:
        raise BenchmarkError(
            "no figures to report: the same trajectory has other numbers of tokens with both "
            f"servers, as {ours[0][0]} and {theirs[0][0]}"
        )
    said = {said for of_round in ours for tokens in of_round for _, said in tokens}
    if said != {SAID} or forks:
        raise BenchmarkError(
            f"no figures to report: turns of {sorted(said)} tokens and not {SAID}, {forks:g} forks"
        )


def figures(rounds: dict[str, list[Round]], counts: dict[str, dict[str, float]]) -> Result:
    ours, turns = counts[OURS], counts[OURS]["turns"]
    lived = sum(one.seconds for of_round in rounds[OURS] for one in of_round.spent)
    outside = 1 - ours["engine_seconds"] / lived
    pairs = zip(rounds[OURS], rounds[THEIRS], strict=True)
    ratio = median(theirs.seconds / mine.seconds for mine, theirs in pairs)
    tokens = sum(len(one.spent) for one in rounds[OURS]) * TURNS * SAID
    return {
        "servers": {
            name: {
                "tokens_per_second": tokens / sum(one.seconds for one in rounds[name]),
                "cache_hit_rate": counts[name]["had_by_cache"] / counts[name]["asked_of_cache"],
            }
            for name in rounds
        },
        "turns": turns,
        "outside_the_engine": outside,
        "route_bytes_of_a_turn": ours["route_bytes"] / turns,
        "full_route_bytes_of_a_turn": ours["full_route_bytes"] / turns,
        "ratio": ratio,
        "goals": {
            "share of a trajectory's time outside the engine": goal(outside, OUTSIDE),
            f"tokens a second, over those of {THEIRS}": goal(ratio, RATIO, at_least=True),
        },
    }


def parts(result: Result) -> Iterable[Any]:
    yield (
        f"{result['trajectories']} trajectories of {TURNS} turns with each, {result['at_once']} at "
        f"a time, in {result['rounds']} rounds; {result['cores']} cores"
    )
    shown = table(["", "sampled tokens/s", "prefix cache hit rate"])
    for name, row in result["servers"].items():
        shown.add_row(name, f"{row['tokens_per_second']:.0f}", f"{row['cache_hit_rate']:.3f}")
    yield shown
    sent, full = result["route_bytes_of_a_turn"], result["full_route_bytes_of_a_turn"]
    yield f"routes of a turn: {sent:.0f} bytes, and {full:.0f} with those of all tokens before it"


def _parser():
    parser = result_parser("bench agents", ABOUT)
    for name, default, what in (
        ("--trajectories", TRAJECTORIES, "with each server"),
        ("--at-once", AT_ONCE, "trajectories at a time"),
        ("--rounds", ROUNDS, "in which the servers take turns"),
    ):
        parser.add_argument(name, type=positive, default=default, help=f"{what} ({default})")
    return parser
