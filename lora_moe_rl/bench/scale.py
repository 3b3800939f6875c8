"""`lora-moe-rl bench scale`: how what a step costs beside its forwards grows with the step.

No engine, no model and no forward: the run's own functions on made-up samples, one after the other.
CPU seconds (the best of some rounds), the peak of the bytes that are allocated meanwhile, and the
exponents of both against the samples of the step, its data-parallel ranks and the engines, each of
which then sends its routes in one part; by least squares on logarithms. 1 is linear, 2 quadratic.

    schedule    every ticket drawn, rolled, scored and trained by the ticket book
    signals     the algorithm's advantages and weights, GRPO
    batch       groups and signals to the trainer's batch
    plan        which samples go together on which rank: every rank does it for all
    pack        one rank's micro-batches
    routes      recorded routes checked, packed, and cut for 4 pipeline stages: by the engines
    replay      one rank's routes fetched, checked and cut
    records     the metrics and the health of a step

Exit code 1 when an exponent is above 1.1.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from lora_moe_rl.bench.report import Result, all_met, busy_cores, conclude, cores, goal
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import names, positive, result_parser
from lora_moe_rl.data.batch import TrainBatch, pack
from lora_moe_rl.data.micro_batches import plan_micro_batches
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment

STEEPEST = 1.1
NEGLIGIBLE_S = 2e-3  # what takes less at the largest size has no exponent to speak of
NEGLIGIBLE_BYTES = 1 << 16
LARGEST, SMALLEST_PART, POINTS = 32_768, 16, 5
FEWER_ROUTES = 8  # routes take longest, and are measured on a step so many times smaller
ROUNDS = 3
GROUP, PROMPT, RESPONSE = 8, 16, 112  # samples a group; tokens, RESPONSE as a mean
MICRO_BATCH = 16 * (PROMPT + RESPONSE)
LAYERS, TOP_K, EXPERTS, STAGES = 8, 2, 64, 4
OTHERS = {"ranks": (1, 4, 16, 64, 256), "engines": (1, 4, 16, 64, 256)}


@dataclass(frozen=True)
class Size:
    """Of a step: `samples`, data-parallel `ranks`, and `engines`, each of which sends its routes in
    one part; 0 for one part a group, as in a run."""

    samples: int
    ranks: int = 8
    engines: int = 0


Work = Callable[[], Any]


def main(argv: Sequence[str]) -> int:
    """Exit code 1 when something grows too fast."""
    parser = result_parser("bench scale", __doc__)
    known = ",".join(PARTS)
    parser.add_argument("--only", default=known, help=f"parts, with commas ({known})")
    parser.add_argument(
        "--samples", type=positive, default=LARGEST, help=f"of the largest step ({LARGEST})"
    )
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help=f"({ROUNDS})")
    options = parser.parse_args(argv)
    parts = names(options.only, "--only", "a part", tuple(PARTS))
    result = measure(parts, options.samples, options.rounds)
    conclude(result, options.json, tables)
    return 0 if all_met(result) else 1


def measure(parts: Sequence[str], largest: int, rounds: int) -> Result:
    result: Result = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": cores(),
        "busy_cores_before": busy_cores(),
        "parts": {},
        "goals": {},
    }
    for name in parts:
        part, axes = PARTS[name], {}
        ladder = _ladder(largest // part.fewer)
        for axis in part.axes:
            steps = ladder if axis == "samples" else list(OTHERS[axis])
            sizes = [replace(Size(ladder[-1]), **{axis: value}) for value in steps]
            axes[axis] = growth(part.prepare, sizes, steps, rounds)
            for what, found in axes[axis]["exponent"].items():
                result["goals"][f"{name}, {what} against {axis}"] = goal(found, STEEPEST)
        result["parts"][name] = axes
    return result


def _ladder(largest: int) -> list[int]:
    """POINTS numbers of samples, in whole groups, the last SMALLEST_PART times the first."""
    first = max(1, largest // GROUP // SMALLEST_PART)
    return [GROUP * round(n) for n in np.geomspace(first, SMALLEST_PART * first, POINTS)]


def growth(
    prepare: Callable[[Size], Work], sizes: Sequence[Size], steps: list[int], rounds: int
) -> Result:
    """Seconds, peak bytes and exponents of what `prepare` gives for each of the sizes."""
    seconds = [min(_seconds(prepare(size)) for _ in range(rounds)) for size in sizes]
    peaks = [_peak(prepare(size)) for size in sizes]
    exponents = {
        "seconds": exponent(steps, seconds, NEGLIGIBLE_S),
        "bytes": exponent(steps, peaks, NEGLIGIBLE_BYTES),
    }
    return {"sizes": steps, "seconds": seconds, "bytes": peaks, "exponent": exponents}


def exponent(sizes: Sequence[float], costs: Sequence[float], negligible: float) -> float:
    """The slope of log cost over log size by least squares; 0 for what stays negligible."""
    if max(costs) < negligible:
        return 0.0
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(costs, 1e-9)), 1)[0])


def _seconds(work: Work) -> float:
    """CPU seconds of this process, of which other programs take none."""
    gc.collect()
    started = time.process_time()
    work()
    return time.process_time() - started


def _peak(work: Work) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def groups_of(size: Size) -> list[Group]:
    """All groups of a step, with responses of half to one and a half times RESPONSE tokens."""
    rng = np.random.default_rng(0)
    tokens, logprobs = np.zeros(2 * RESPONSE, np.int32), np.zeros(2 * RESPONSE, np.float32)
    lengths = rng.integers(RESPONSE // 2, 3 * RESPONSE // 2, size.samples).reshape(-1, GROUP)
    prompt = Segment.given("user", tokens[:PROMPT])
    return [
        Group(
            Prompt(row, "", [0] * PROMPT),
            [
                Sample((prompt, Segment.sampled(tokens[:n], logprobs[:n], 0)), "stop", "")
                for n in of_group.tolist()
            ],
            None,
            np.arange(GROUP, dtype=np.float32),
        )
        for row, of_group in enumerate(lengths)
    ]


@lru_cache(maxsize=1)
def batch_of(samples: int) -> TrainBatch:
    groups = groups_of(Size(samples))
    return TrainBatch.from_groups(groups, _signals(groups), 1, 1)


def _signals(groups: list[Group]) -> list:
    from lora_moe_rl import algorithms
    from lora_moe_rl.algorithms.parts.step_signals import signals_of

    return signals_of(algorithms.make(RunConfig(algorithm={"name": "grpo"})), groups)


def _plan(batch: TrainBatch, size: Size) -> list[list[list[int]]]:
    return plan_micro_batches(range(size.samples), batch.lengths(), MICRO_BATCH, size.ranks)


def schedule(size: Size) -> Work:
    from lora_moe_rl.run.schedule import Schedule
    from lora_moe_rl.run.tickets import TicketBook

    async def step(groups: list[Group]) -> None:
        book, answers = TicketBook(Schedule(len(groups))), asyncio.Semaphore(0)

        async def feed() -> None:
            for group in groups:
                await book.slot()
                book.admit(group.prompt, {})

        async def roll() -> None:
            while ticket := await book.claim(lambda: 0):
                await answers.acquire()
                book.scored(ticket, groups[ticket.number])

        async def learn() -> None:
            tickets = await book.next_step(0)
            book.trained(tickets or ())
            book.close()

        async with asyncio.TaskGroup() as tasks:
            for task in (feed(), learn(), *(roll() for _ in groups)):
                tasks.create_task(task)
            for _ in groups:  # one answer after the other, each heard of before the next
                answers.release()
                for _ in range(3):
                    await asyncio.sleep(0)

    groups = [Group(Prompt(i, "", []), [], None, np.zeros(0)) for i in range(size.samples // GROUP)]
    return lambda: asyncio.run(step(groups))


def signals(size: Size) -> Work:
    groups = groups_of(size)
    return lambda: _signals(groups)


def batch(size: Size) -> Work:
    groups = groups_of(size)
    signals = _signals(groups)
    return lambda: TrainBatch.from_groups(groups, signals, 1, 1)


def travel(size: Size) -> Work:
    """As Ray hands it to a rank of the same node: pickled once, large arrays aside, and read."""
    made = batch_of(size.samples)

    def work() -> None:
        aside: list[pickle.PickleBuffer] = []
        pickle.loads(pickle.dumps(made, 5, buffer_callback=aside.append), buffers=aside)

    return work


def plan(size: Size) -> Work:
    made = batch_of(size.samples)
    return lambda: _plan(made, size)


def packing(size: Size) -> Work:
    made = batch_of(size.samples)
    mine = _plan(made, size)[0]
    return lambda: [pack(made, chunk, 1) for chunk in mine]


def routes(size: Size) -> Work:
    made = batch_of(size.samples)
    return lambda: _sent(made, size)


def _sent(made: TrainBatch, size: Size) -> list:
    """The routes of all samples, in as many parts as engines."""
    from lora_moe_rl.router_replay.table import RouteTable
    from lora_moe_rl.router_replay.travel import send

    layers = tuple(range(LAYERS))
    pieces = [layers[k : k + LAYERS // STAGES] for k in range(0, LAYERS, LAYERS // STAGES)]
    recorded, lengths = _recorded(), made.lengths().tolist()
    ends = np.linspace(0, size.samples, (size.engines or size.samples // GROUP) + 1).astype(int)
    sent = []
    for first, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        rows = [recorded[:length] for length in lengths[first:stop]]
        table = RouteTable.build(rows, lengths[first:stop], layers, EXPERTS, TOP_K)
        sent.append(send(table, pieces))
    return sent


@lru_cache(maxsize=1)
def _sent_once(size: Size) -> list:
    return _sent(batch_of(size.samples), size)


@cache
def _recorded() -> np.ndarray:
    """uint8 [tokens, layers, top_k], enough for any sample."""
    first = np.random.default_rng(0).integers(0, EXPERTS // 2, (2 * RESPONSE, LAYERS, 1))
    return np.concatenate([first, first + EXPERTS // 2], axis=2).astype(np.uint8)


def replay(size: Size) -> Work:
    from lora_moe_rl.router_replay.routes import Routes

    made = batch_of(size.samples)
    sent, mine = _sent_once(size), [i for chunk in _plan(made, size)[0] for i in chunk]

    def work() -> None:
        found = Routes(sent, [tuple(range(LAYERS // STAGES))])
        found.check_samples(made.lengths())
        found.fetch(mine)

    return work


def records(size: Size) -> Work:
    from lora_moe_rl.run.health import Health
    from lora_moe_rl.run.records import age_metrics, rollout_metrics
    from lora_moe_rl.run.reward_metrics import reward_metrics

    groups, config = groups_of(size), RunConfig()
    signals = _signals(groups)

    def work() -> None:
        samples = [sample for group in groups for sample in group.samples]
        rollout_metrics(samples, 1.0)
        age_metrics(samples, 0)
        reward_metrics(groups, config)
        Health().look(1, groups, signals)

    return work


@dataclass(frozen=True)
class Part:
    """`prepare` makes the work of a size, which alone is measured, against each of the `axes`."""

    prepare: Callable[[Size], Work]
    axes: Sequence[str] = ("samples",)
    fewer: int = 1


PARTS = {
    "schedule": Part(schedule),
    "signals": Part(signals),
    "batch": Part(batch),
    "travel": Part(travel),
    "plan": Part(plan, ("samples", "ranks")),
    "pack": Part(packing, ("samples", "ranks")),
    "routes": Part(routes, ("samples", "engines"), FEWER_ROUTES),
    "replay": Part(replay, ("samples", "ranks", "engines"), FEWER_ROUTES),
    "records": Part(records),
}


def tables(result: Result) -> Iterator[Any]:
    """What is printed of the figures: a table for each axis and its sizes."""
    from lora_moe_rl.verify import report

    made: dict[tuple[str, ...], Any] = {}
    for name, axes in result["parts"].items():
        for axis, row in axes.items():
            steps = [f"{step:,}" for step in row["sizes"]]
            columns = ["CPU ms", *steps, "exponent", "MB", "exponent"]
            title = f"against {axis}"
            table = made.setdefault((axis, *steps), report.table(columns, title))
            cells = (f"{1e3 * seconds:,.1f}" for seconds in row["seconds"])
            slopes = [f"{row['exponent'][what]:.2f}" for what in ("seconds", "bytes")]
            table.add_row(name, *cells, slopes[0], f"{row['bytes'][-1] / 1e6:,.1f}", slopes[1])
    yield from made.values()
