"""The loop over faulty ports, without engines, ranks or models."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
from faulty_ports import FaultyEngines, PlainChannel, PlainTrainer, Prompts

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Sample, Segment
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.errors import LoraMoeRlError, MismatchError, RewardError
from lora_moe_rl.run import loop
from lora_moe_rl.run.evaluations import Evaluations
from lora_moe_rl.run.publisher import Publisher
from lora_moe_rl.run.schedule import Schedule
from lora_moe_rl.run.tickets import TicketBook
from lora_moe_rl.telemetry.timeline import Timeline

CONFIG = RunConfig(
    trainer={"steps": 2}, algorithm={"name": "grpo", "prompts_per_step": 2, "group_size": 2}
)


class Trainer(PlainTrainer):
    """Each update makes a version, but for the steps `skipped`. Keeps the batches; `events` is
    what happened in turn."""

    skipped: tuple[int, ...] = ()

    def __init__(self, events: list[str]):
        super().__init__()
        self.batches, self.events = [], events

    async def update(self, batch, routes):
        self.events.append("update")
        for _ in range(20):  # others have time
            await asyncio.sleep(0)
        self.batches.append(batch)
        self.version += batch.step not in self.skipped
        metrics = {"loss/kl": 0.01 * batch.step}
        return UpdateResult(self.version, metrics, 0, 0, 1.0), await self.send()


class Engines(FaultyEngines):
    """`asked`: the (version, seed) of every ticket."""

    restarts = 0

    def policy(self, version, seed, watch, manner=None):
        self.asked.append((version, seed))
        return manner

    async def all_back(self) -> None:
        self.events.append("all back")

    def overwrite(self) -> None:
        self.events.append("overwrite")

    async def give_way(self) -> None:
        self.events.append("give way")

    async def pin(self, version) -> None:
        self.events.append(f"pin {version}")


class Source(Prompts):
    drawn = 0

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]

    def next(self, count):
        self.drawn += count
        found = super().next(self.drawn)[-count:]
        return [replace(prompt, number=self.drawn - 1) for prompt in found]


class Environment:
    """The first sample of each group is right, the second wrong; but for the prompts `equal`, where
    both are right, and the first `failed`, where the second one's reward failed. A `slow`
    prompt comes, the first time, when the trainer waits for it. One sample alone, which has to be
    greedy, is half right, or has `failed` as well."""

    def __init__(
        self,
        events: list[str],
        book: TicketBook,
        equal: Container[int] = (),
        slow: int = -1,
        failed: int = 0,
    ):
        self.events, self.book, self.equal, self.slow = events, book, equal, slow
        self.failed = failed

    def held_out(self, group_size, max_response_tokens):
        assert (group_size, max_response_tokens) == (1, None)
        return SimpleNamespace(rollout=self._alone)

    async def _alone(self, prompt, policy) -> Group:
        assert policy.policy.temperature == 0 and policy.policy.max_tokens is None
        group = await self.rollout(prompt, policy)
        failures = group.failures
        rewards = np.array([np.nan if failures else 0.5], np.float32)
        return Group(prompt, group.samples[:1], None, rewards, failures)

    async def rollout(self, prompt, policy) -> Group:
        self.events.append(f"roll {prompt.number}")
        await asyncio.sleep(0)
        if prompt.number == self.slow:
            self.slow = -1
            while not self.book.waits["the oldest groups"] and not self.book.closed:
                await asyncio.sleep(0)
        rewards = [1, 1] if prompt.number in self.equal else [1, 0]
        failures = ["the judge is gone"] if prompt.number < self.failed else []
        rewards = [1, np.nan] if failures else rewards
        response = Segment.sampled([7, 8], np.zeros(2), 0)
        sample = Sample((Segment.given("user", prompt.token_ids), response), "stop", "")
        return Group(prompt, [sample, sample], None, np.array(rewards, np.float32), failures)


class Records:
    """`refuses`: raises for this step's update; `unrewarded`: for this step's rewards. `plateau`:
    what it says each time it is asked, then None. A checkpoint is due at the steps `due`. A signal
    comes with the event `stops`."""

    events: list[str]

    def __init__(self, refuses=0, unrewarded=0, plateau=(), due=(2,), stops=""):
        self.stops = stops
        self.plateau, self.ended = list(plateau), []
        self.refuses, self.unrewarded, self.steps, self.again = refuses, unrewarded, [], 0
        self.kept: list[tuple] = []
        self.due, self.books = due, []
        self.updated: list[tuple[int, int]] = []

    @property
    def stop_requested(self):
        return self.stops in self.events

    def progress(self):
        return nullcontext()

    def check_update(self, step, groups, signals, result):
        assert len(groups) == len(signals) == 2
        if step == self.refuses:
            raise MismatchError("too far apart")

    def step(self, facts, clock):
        self.steps.append(facts)

    def rolled(self, number): ...

    def check_rewards(self, groups):
        if len(self.steps) + 1 == self.unrewarded:
            raise RewardError("the judge is gone")

    def keep_unrewarded(self, step, groups):
        self.kept.append((step, [group.prompt.number for group in groups]))

    def check_ages(self, step, groups, version):
        assert len(groups) == 2
        self.updated.append((step, version))

    def drawn_again(self, group):
        self.again += 1
        if self.again > 4:
            raise RewardError(f"no prompt has a signal ({self.again})")

    def keep_trained(self, step):
        return step > 0 and f"written {step}" not in self.events

    def checkpoint_is_due(self, step):
        return step in self.due

    async def checkpoint(self, step, book, tasks):
        self.events.append(f"checkpoint {step}")
        self.books.append(book)
        for _ in range(60):
            await asyncio.sleep(0)
        self.events.append(f"written {step}")

    async def finish(self):
        self.events.append("finish")

    def plateau_at(self, step):
        return self.plateau.pop(0) if self.plateau else None

    def end_early(self, ended, step):
        self.ended.append((ended, step))
        return True


class Evaluator:
    """Takes as long as an update, and longer. The rewards of the step `failing` fail."""

    def __init__(self, events: list[str], failing: int):
        self.events, self.failing = events, failing

    async def evaluate(self, step, version):
        self.events.append(f"evaluate {step} at {version}")
        for _ in range(60):
            await asyncio.sleep(0)
        if step == self.failing:
            raise RewardError("the judge is gone")
        self.events.append(f"evaluated {step}")


class Teacher:
    """Says the same of every sample."""

    async def score(self, group: Group) -> None:
        await asyncio.sleep(0)
        group.teacher = [np.array([-0.5, -2.0], np.float32) for _ in group.samples]


def run(
    engines=None,
    refuses=0,
    lag=0,
    equal=(),
    config=CONFIG,
    stale="wait",
    slow=-1,
    unrewarded=0,
    teacher=None,
    recorded=(),
    plateau=(),
    failed=0,
    unevaluated=-1,
    due=(2,),
    kl=None,
    skipped=(),
    stops="",
) -> SimpleNamespace:
    """Ends as the run does; what it was made of can be looked at in any case."""
    events: list[str] = []
    engines = engines or Engines()
    engines.events, engines.asked, engines.step = events, [], 0.1
    made = SimpleNamespace(
        trainer=Trainer(events),
        engines=engines,
        records=Records(refuses, unrewarded, plateau, due, stops),
        events=events,
        timeline=[],
        error=None,
    )
    made.records.events = events
    made.trainer.skipped = skipped
    source = Source()
    publisher = Publisher(config, made.trainer, engines, PlainChannel(), source, "float32")
    book = TicketBook(Schedule(2, lag, stale=stale))
    environment = Environment(events, book, equal, slow, failed)
    algorithm = algorithms.make(config)
    ports = loop.Ports(
        config,
        source,
        environment,
        algorithm,
        engines,
        made.trainer,
        publisher,
        made.records,
        Timeline(1, made.timeline.append),
        Evaluations(config, Evaluator(events, unevaluated), engines, recorded),
        teacher,
        kl,
    )
    try:
        asyncio.run(loop.run(ports, book, 1))
    except (LoraMoeRlError, LookupError) as error:  # of us, and of a user's code
        made.error = error
    return made


def of_steps(steps: int, **settings) -> RunConfig:
    given = CONFIG.model_dump(exclude_unset=True) | {"trainer": {"steps": steps}} | settings
    return RunConfig.model_validate(given)


def evaluating(lag: int) -> RunConfig:
    sets = {"sums": {"path": "sums.jsonl"}}
    more = {"eval": {"sets": sets, "every": 1}, "schedule": {"lag": lag}}
    return RunConfig.model_validate(CONFIG.model_dump(exclude_unset=True) | more)
