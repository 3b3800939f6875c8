"""When a run evaluates and who waits, over the loop with engines, trainer and evaluator that are
fakes."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import DiskError, EngineDied, EngineLost, RewardError
from lora_moe_rl.run.evaluations import Evaluations
from lora_moe_rl.run.schedule import Schedule
from lora_moe_rl.run.tickets import TicketBook


class Engines:
    def __init__(self, events):
        self.events = events

    async def pin(self, version):
        self.events.append(f"pin {version}")


class Evaluator:
    """Takes until `go` is set. `raises`: what it raises then."""

    def __init__(self, events, raises=None):
        self.events, self.raises, self.go = events, raises, asyncio.Event()

    async def evaluate(self, step, version):
        self.events.append(f"begin {step} at {version}")
        await self.go.wait()
        if self.raises:
            raise self.raises
        self.events.append(f"end {step}")


def make(lag=0, recorded=(), raises=None, steps=4) -> SimpleNamespace:
    sets = {"sums": {"path": "sums.jsonl"}}
    config = RunConfig.model_validate(
        {
            "trainer": {"steps": steps},
            "eval": {"sets": sets, "every": 2},
            "schedule": {"lag": lag},
        }
    )
    events: list[str] = []
    evaluator = Evaluator(events, raises)
    evaluations = Evaluations(config, evaluator, Engines(events), recorded)
    book = TicketBook(Schedule(2, lag))
    return SimpleNamespace(
        evaluations=evaluations, evaluator=evaluator, events=events, book=book, go=evaluator.go
    )


async def soon() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_with_lag_0_the_run_waits_and_draws_no_prompt_meanwhile():
    made = make()
    async with asyncio.TaskGroup() as tasks:
        feeding = tasks.create_task(made.book.slot())
        await soon()
        assert feeding.done()  # without an evaluation there is a slot
        taking = tasks.create_task(made.evaluations.take(2, 7, made.book, tasks))
        await soon()
        feeding = tasks.create_task(made.book.slot())
        await soon()
        assert not taking.done() and not feeding.done()
        assert made.book.waits == {"an evaluation": 1}
        made.go.set()
        await soon()
        assert taking.done() and feeding.done()
    assert made.events == ["begin 2 at 7", "end 2"]


async def test_with_lag_the_run_goes_on_and_the_version_keeps_its_slot_until_the_end():
    made = make(lag=1)
    async with asyncio.TaskGroup() as tasks:
        await made.evaluations.take(2, 7, made.book, tasks)
        assert made.book.waits == {} and await made.book.slot()
        await soon()
        assert made.events == ["pin 7", "begin 2 at 7"]
        ending = tasks.create_task(made.evaluations.ended())
        taking = tasks.create_task(made.evaluations.take(4, 9, made.book, tasks))
        await soon()
        assert not ending.done() and not taking.done()  # the checkpoint, and the next evaluation
        made.go.set()
    assert made.events == [
        *("pin 7", "begin 2 at 7", "end 2", "pin None"),
        *("pin 9", "begin 4 at 9", "end 4", "pin None"),
    ]


@pytest.mark.parametrize("lag", [0, 1])
async def test_what_is_not_due_or_on_record_is_not_evaluated(lag):
    made = make(lag, recorded={0, 2})
    made.go.set()
    async with asyncio.TaskGroup() as tasks:
        for step in range(5):
            await made.evaluations.take(step, step, made.book, tasks)
            await made.evaluations.ended()
    assert [event for event in made.events if "begin" in event] == ["begin 4 at 4"]


async def test_a_version_that_no_engine_serves_any_more_ends_its_evaluation_alone(caplog):
    made = make(lag=1, raises=EngineDied("no engine serves version 7 any more"))
    made.go.set()
    with caplog.at_level(logging.WARNING):
        async with asyncio.TaskGroup() as tasks:
            await made.evaluations.take(2, 7, made.book, tasks)
            await made.evaluations.ended()
    assert "step 2 has no evaluation: no engine serves version 7" in caplog.text
    assert made.events[-1] == "pin None"


@pytest.mark.parametrize(
    "error",
    [RewardError("gone"), EngineLost("engine-0", "gone"), DiskError("gone"), KeyError("gone")],
)
async def test_what_fails_beside_training_is_told_when_the_run_asks_and_frees_the_slot(error):
    """So that the update that is under way is not broken off, and whoever writes checkpoints can
    write one first."""
    made = make(lag=1, raises=error)
    made.go.set()
    async with asyncio.TaskGroup() as tasks:
        await made.evaluations.take(2, 7, made.book, tasks)
        made.evaluations.check()  # nothing is known yet
        await made.evaluations.ended()
        for step in (3, 4):  # whether one is due or not
            with pytest.raises(type(error), match="gone"):
                await made.evaluations.take(step, 8, made.book, tasks)
        with pytest.raises(type(error)):
            made.evaluations.check()
    assert made.events == ["pin 7", "begin 2 at 7", "pin None"]
