"""Engines that leave a run and join it: who is asked what, and when the run stops after all."""

from __future__ import annotations

import asyncio

import pytest
from engine_group import asked, fate

from lora_moe_rl.cluster.engines import RolloutEngines
from lora_moe_rl.errors import ActorFailed, EngineDied

pytestmark = pytest.mark.seconds  # Ray is started for them
ANSWERED_S = 30


async def sampled(engines: RolloutEngines, tickets: int = 4) -> list[str]:
    """Which engine samples each ticket, which is given out again when one dies over it."""

    async def roll(ticket: int) -> str:
        while True:
            try:
                policy = engines.policy(engines.published[0], seed=ticket)
                _, sent = await policy.sample([ticket], n=2)
                return sent.blocks[0].parts[0]
            except EngineDied:
                continue

    async with asyncio.timeout(ANSWERED_S):
        return await asyncio.gather(*(roll(ticket) for ticket in range(tickets)))


async def joined(engines: RolloutEngines, version: int) -> int:
    """Publishes versions from this one on until all engines are there; the next version."""
    for _ in range(10 * ANSWERED_S):
        await engines.publish(version, [])
        version += 1
        if not engines.absent:
            return version
        await asyncio.sleep(0.1)
    raise AssertionError(f"{engines.absent} did not join")


def test_a_run_starts_with_the_least_and_others_join_with_a_version(start, tmp_path):
    engines = start(engines=3, least_engines=1)
    assert engines.present == [0] and list(engines.actors) == [0]

    async def run():
        receipts = await engines.publish(3, [])
        assert len(receipts) == 1 and engines.present == [0]
        assert set(await sampled(engines)) == {"table-0"}
        after = await joined(engines, 4)
        assert {*await sampled(engines, 6)} == {"table-0", "table-1", "table-2"}
        return after - 1

    newest = asyncio.run(run())
    for index in (1, 2):
        told = asked(tmp_path, index)
        assert told[:3] == ["start", "prepare_refit", "pin None"]
        first = int(told[3].removeprefix("publish "))
        assert told[3 : 4 + newest - first] == [f"publish {v}" for v in range(first, newest + 1)]
        assert engines.oldest[index] == first > 3


def test_one_that_dies_too_often_leaves_gives_its_tickets_back_and_joins_again(start, tmp_path):
    engines = start(engines=2, least_engines=1, max_restarts=0)

    async def run():
        version = await joined(engines, 3)
        fate(tmp_path, 1, "sample", "exit")
        assert set(await sampled(engines)) == {"table-0"}
        assert engines.present == [0] and engines.restarts == 0
        assert await engines.differing(version - 1, []) == ["tensor", "tensor-0"]
        (found,) = await engines.score([[1]], version - 1)
        assert found.logprobs == ("probe", (version - 1,))
        await engines.pin(version - 1)
        await joined(engines, version)
        assert set(await sampled(engines)) == {"table-0", "table-1"}

    asyncio.run(run())
    assert "pin" in [line.split()[0] for line in asked(tmp_path, 1)]


@pytest.mark.parametrize("method", ["publish", "probe", "differing"])
def test_one_that_dies_over_a_version_leaves_and_the_others_have_it(
    start, tmp_path, method, caplog
):
    engines = start(engines=2, least_engines=1, max_restarts=0)

    async def run():
        version = await joined(engines, 3)
        fate(tmp_path, 0, method, "dead")
        receipts = await engines.publish(version, [])
        scores = await engines.score([[1]], version)
        differing = await engines.differing(version, [])
        assert engines.present == [1] and differing == ["tensor", "tensor-1"]
        assert len(receipts) == (1 if method == "publish" else 2)
        assert len(scores) == (2 if method == "differing" else 1)
        await joined(engines, version + 1)

    asyncio.run(run())
    why = "vLLM's processes of engine 0 have ended"
    assert f"engine-0 has left the run ({why}), which goes on with 1;" in caplog.text


def test_one_that_does_not_start_is_tried_again(start, tmp_path):
    engines = start(engines=2, least_engines=1)
    fate(tmp_path, 1, "start", "exit", "dead")
    asyncio.run(joined(engines, 3))
    assert asked(tmp_path, 1).count("start") == 3


@pytest.mark.parametrize("arrived", [True, False])
def test_one_that_is_arriving_stands_in_for_the_last(start, tmp_path, arrived):
    engines = start(engines=2, least_engines=1, max_restarts=0)

    async def run():
        await engines.publish(3, [])  # and begins to start the other
        for _ in range(10 * ANSWERED_S if arrived else 0):
            if engines._arriving[1].done():
                break
            await asyncio.sleep(0.1)
        assert engines._arriving[1].done() == arrived and engines.present == [0]
        await engines.pin(3)
        fate(tmp_path, 0, "sample", "exit")
        assert set(await sampled(engines)) == {"table-1"}
        assert engines.present == [1] and engines.oldest[1] == 3 and engines.restarts == 0
        await joined(engines, 4)
        assert set(await sampled(engines)) == {"table-0", "table-1"}

    asyncio.run(run())
    told = asked(tmp_path, 1)
    assert told[:2] == ["start", "prepare_refit"] and told.index("pin 3") < told.index("publish 3")
    assert (1, 3) in engines.proven


def test_one_that_stands_in_over_a_version_takes_it(start, tmp_path):
    engines = start(engines=2, least_engines=1, max_restarts=0)

    async def run():
        await engines.publish(3, [])
        fate(tmp_path, 0, "publish", "dead")
        engines.overwrite()
        receipts = await engines.publish(4, [])
        assert len(receipts) == 1 and engines.present == [1] and engines.oldest[1] == 4
        assert not engines.empty
        assert set(await sampled(engines)) == {"table-1"}

    asyncio.run(run())
    assert asked(tmp_path, 1).count("publish 4") == 1


def test_one_that_stands_in_and_does_not_start_stops_the_run(start, tmp_path):
    engines = start(engines=2, least_engines=1, max_restarts=0)
    fate(tmp_path, 1, "start", "dead")

    async def run():
        await engines.publish(3, [])
        fate(tmp_path, 0, "sample", "exit")
        await sampled(engines)

    with pytest.raises(ActorFailed, match="rollout.max_restarts=0 allows no more"):
        asyncio.run(asyncio.wait_for(run(), ANSWERED_S))


def test_with_the_least_of_them_a_death_too_many_stops_the_run(start, tmp_path):
    engines = start(engines=2, least_engines=2, max_restarts=0)
    fate(tmp_path, 0, "publish", "dead")
    with pytest.raises(ActorFailed, match="rollout.max_restarts=0 allows no more"):
        asyncio.run(engines.publish(3, []))
