"""The parts of `bench scale`: what is done with made-up samples, of any size."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np

from lora_moe_rl.config import RunConfig, TrainerConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.micro_batches import plan_for
from lora_moe_rl.data.packing import MicroBatch, pack
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.shares import shares

FEWER_ROUTES = 8  # routes take longest, and are measured on a step so many times smaller
GROUP, PROMPT, RESPONSE = 8, 16, 112  # samples a group; tokens, RESPONSE as a mean
SAMPLES_AT_ONCE = 16  # of a micro-batch
TOP_K, STAGES = 2, 4


@dataclass(frozen=True)
class Size:
    """The size of a step: `samples` with responses of `tokens` (the mean), data-parallel `ranks`,
    and `engines`, each of which sends its routes in one part; 0 for one part a group, as in a run.
    The model has `layers` with `experts` each."""

    samples: int
    tokens: int = RESPONSE
    ranks: int = 8
    engines: int = 0
    layers: int = 8
    experts: int = 64

    @property
    def micro_batch(self) -> int:
        return SAMPLES_AT_ONCE * (PROMPT + self.tokens)


Work = Callable[[], Any]


def groups_of(size: Size) -> list[Group]:
    """All groups of a step, with responses of half to one and a half times as many tokens."""
    rng, n = np.random.default_rng(0), size.tokens
    tokens, logprobs = np.zeros(PROMPT + 2 * n, np.int32), np.zeros(2 * n, np.float32)
    lengths = rng.integers(max(1, n // 2), 3 * n // 2 + 1, size.samples).reshape(-1, GROUP)
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
def _batch_of(samples: int, tokens: int) -> TrainBatch:
    groups = groups_of(Size(samples, tokens))
    return TrainBatch.from_groups(groups, _signals(groups), 1, 1, share_prompts=True)


def batch_of(size: Size) -> TrainBatch:
    return _batch_of(size.samples, size.tokens)


def _signals(groups: list[Group]) -> list:
    from lora_moe_rl import algorithms
    from lora_moe_rl.algorithms.parts.step_signals import signals_of

    return signals_of(algorithms.make(RunConfig(algorithm={"name": "grpo"})), groups)


def _plan(batch: TrainBatch, size: Size) -> list[list[list[int]]]:
    trainer = TrainerConfig(world_size=size.ranks, micro_batch_tokens=size.micro_batch)
    return plan_for(trainer, range(size.samples), batch, size.ranks)


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
    return lambda: TrainBatch.from_groups(groups, signals, 1, 1, share_prompts=True)


def travel(size: Size) -> Work:
    """As Ray hands it on: each rank's share is pickled, large arrays aside, and one is read."""
    made = batch_of(size)
    trainer = {"world_size": size.ranks, "micro_batch_tokens": size.micro_batch}
    config = RunConfig.model_validate({"model": "qwen3_moe", "trainer": trainer})

    def work() -> None:
        for share in shares(made, config):
            aside: list[pickle.PickleBuffer] = []
            data = pickle.dumps(share, 5, buffer_callback=aside.append)
        pickle.loads(data, buffers=aside)

    return work


def plan(size: Size) -> Work:
    made = batch_of(size)
    return lambda: _plan(made, size)


def packing(size: Size) -> Work:
    made = batch_of(size)
    mine = _plan(made, size)[0]

    def work() -> list[MicroBatch]:
        packed = [pack(made, chunk, 1) for chunk in mine]
        for one in packed:  # what the trainer asks each for
            _ = one.positions, one.rows, one.sample_of, one.copies
            _ = one.rollout_logprobs, one.advantages
            _ = one.input_ids[one.fed].astype(np.int64), one.labels.astype(np.int64)
        return packed

    return work


def routes(size: Size) -> Work:
    made = batch_of(size)
    return lambda: _sent(made, size)


def _sent(made: TrainBatch, size: Size) -> list:
    """The routes of all samples, in as many parts as engines."""
    from lora_moe_rl.router_replay.table import RouteTable
    from lora_moe_rl.router_replay.travel import send

    layers, each = tuple(range(size.layers)), size.layers // STAGES
    pieces = [layers[k : k + each] for k in range(0, size.layers, each)]
    lengths = made.lengths().tolist()
    recorded = _recorded(max(lengths), size.layers, size.experts)
    ends = np.linspace(0, size.samples, (size.engines or size.samples // GROUP) + 1).astype(int)
    sent = []
    for first, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        rows = [recorded[:length] for length in lengths[first:stop]]
        table = RouteTable.build(rows, lengths[first:stop], layers, size.experts, TOP_K)
        sent.append(send(table, pieces))
    return sent


@lru_cache(maxsize=1)
def _sent_once(size: Size) -> list:
    return _sent(batch_of(size), size)


@cache
def _recorded(tokens: int, layers: int, experts: int) -> np.ndarray:
    """uint8 or uint16 [tokens, layers, top_k]."""
    first = np.random.default_rng(0).integers(0, experts // 2, (tokens, layers, 1))
    both = np.concatenate([first, first + experts // 2], axis=2)
    return both.astype(np.uint8 if experts <= 256 else np.uint16)


def replay(size: Size) -> Work:
    from lora_moe_rl.router_replay.routes import Routes

    made = batch_of(size)
    sent, mine = _sent_once(size), [i for chunk in _plan(made, size)[0] for i in chunk]

    def work() -> None:
        found = Routes(sent, [tuple(range(size.layers // STAGES))])
        found.check_samples(made.lengths())
        found.fetch(mine, made.fed)

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
    """`prepare` makes the work of a size, which alone is measured, against each of the `axes`.
    `at`: sizes other than the defaults, of what does not grow."""

    prepare: Callable[[Size], Work]
    axes: Sequence[str] = ("samples",)
    fewer: int = 1
    at: Mapping[str, int] = field(default_factory=dict)


def _of_adapter(name: str) -> Callable[[Size], Work]:
    """Needs torch, which the other parts do not."""

    def prepare(size: Size) -> Work:
        from lora_moe_rl.bench import scale_adapter

        return getattr(scale_adapter, name)(size)

    return prepare


MODEL = {"layers": 16, "experts": 96}
PARTS = {
    "schedule": Part(schedule),
    "signals": Part(signals),
    "batch": Part(batch),
    "travel": Part(travel, ("samples", "ranks")),
    "plan": Part(plan, ("samples", "ranks")),
    "pack": Part(packing, ("samples", "ranks")),
    "routes": Part(routes, ("samples", "engines", "layers"), FEWER_ROUTES),
    "replay": Part(replay, ("samples", "ranks", "engines", "layers"), FEWER_ROUTES),
    "records": Part(records),
    "refit": Part(_of_adapter("refit_plan"), ("ranks", "layers"), at={"layers": 4, "experts": 256}),
    "send": Part(_of_adapter("sending"), ("layers", "experts"), at=MODEL),
    "export": Part(_of_adapter("export"), ("layers", "experts"), at=MODEL),
    "import": Part(_of_adapter("reading"), ("layers", "experts"), at=MODEL),
}
