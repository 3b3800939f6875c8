"""A run in which nothing happens any more is stopped, and says where its loops wait."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Prompt
from lora_moe_rl.errors import StallError
from lora_moe_rl.run.schedule import Schedule
from lora_moe_rl.run.stall import Stall, patience
from lora_moe_rl.run.tickets import TicketBook


def make(**facts):
    """A watchdog of 10 seconds, and the facts that it looks at."""
    given = {"progress": 0, "under_way": [], "waits": Counter({"a slot": 1})}
    seen = SimpleNamespace(**given | facts)
    stall = Stall(
        10,
        lambda: seen.progress,
        lambda: seen.under_way,
        lambda: seen.waits,
        lambda: "The stacks are in logs",
    )
    return stall, seen


async def look_at(stall, seen, seconds: int, each=lambda second: None) -> None:
    for second in range(1, seconds + 1):
        each(second)
        stall.look()


def test_a_run_that_stands_still_is_stopped_and_says_what_is_waited_for():
    stall, seen = make()
    asyncio.run(look_at(stall, seen, 9))
    with pytest.raises(StallError, match=r"nothing has happened for 10 s .*a slot \(1\)") as info:
        asyncio.run(look_at(stall, seen, 10))
    assert "The stacks are in logs" in str(info.value) and "--resume" in str(info.value)
    assert info.value.exit_code == 75


def test_what_happens_or_is_under_way_is_no_standstill():
    stall, seen = make()
    asyncio.run(look_at(stall, seen, 50, lambda second: setattr(seen, "progress", second // 9)))
    stall, seen = make(under_way=["engine-0: sample 3"])
    asyncio.run(look_at(stall, seen, 50))
    seen.under_way = []
    with pytest.raises(StallError, match="for 10 s"):
        asyncio.run(look_at(stall, seen, 60))


def test_before_the_loops_run_nothing_is_judged():
    stall, seen = make(waits=Counter())
    asyncio.run(look_at(stall, seen, 50))


def test_what_has_a_time_out_of_its_own_is_given_it():
    assert patience(RunConfig(faults={"stall_s": 100}, reward={"timeout_s": 70})) == 170
    teacher = {"name": "opd", "teacher_patience_s": 7200}
    assert patience(RunConfig(faults={"stall_s": 100}, algorithm=teacher)) == 7300
    tools = {"name": "tools", "tools": ["lora_moe_rl.tools.calculator:calculator"]}
    config = RunConfig(
        environment=tools | {"tool_timeout_s": 500}, faults={"stall_s": 100}, model="qwen3_moe"
    )
    assert patience(config) == 600


def test_a_wake_up_that_is_lost_is_found_and_the_waiting_loops_are_named(monkeypatch):
    """Two loops as the run has them; the one that scores forgets to wake the one that learns."""
    monkeypatch.setattr(TicketBook, "scored", lambda book, ticket, group: book._ended(ticket))
    book = TicketBook(Schedule(1, 0))

    async def roll():
        while ticket := await book.claim(lambda: 0):
            book.scored(ticket, None)

    async def learn():
        book.admit(Prompt(0, "", [1]), {})
        await book.next_step(0)

    async def steps():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(roll())
            tasks.create_task(learn())

    stall = Stall(0.2, lambda: book.progress, list, lambda: book.waits, lambda: "Stacks")
    with pytest.raises(StallError) as info:
        asyncio.run(stall.watched(steps()))
    assert "roll > claim > _until (run/tickets.py:" in str(info.value)
    assert "learn > next_step > _until (run/tickets.py:" in str(info.value)
    assert "a ticket to roll (1)" in str(info.value) and "scored groups (1)" in str(info.value)


def test_work_that_ends_or_fails_ends_the_watch():
    async def fine():
        await asyncio.sleep(0)

    async def fails():
        raise RuntimeError("as raised")

    stall, _ = make()
    asyncio.run(stall.watched(fine()))
    with pytest.raises(RuntimeError, match="as raised"):
        asyncio.run(stall.watched(fails()))


def test_a_run_that_is_interrupted_leaves_no_task_behind():
    stall, _ = make()

    async def interrupted():
        watched = asyncio.create_task(stall.watched(asyncio.sleep(600)))
        await asyncio.sleep(0)
        watched.cancel()
        await asyncio.wait([watched])
        assert watched.cancelled()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(interrupted())
