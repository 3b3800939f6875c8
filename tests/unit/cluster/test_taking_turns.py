"""Engines that give way to the trainer: what each is told and when, what waits meanwhile, and what
becomes of one that dies over it."""

from __future__ import annotations

import asyncio
import time

import pytest
from engine_group import asked, fate

from lora_moe_rl.cluster.turns import OutOfTurn, Phase
from lora_moe_rl.errors import EngineDied

pytestmark = pytest.mark.seconds  # Ray is started for them


@pytest.fixture
def proven(start):
    """Makes engines that serve version 3, which is proven."""

    def make(placement="colocated", **rollout):
        engines = start(placement, **rollout)
        engines.go_on()
        return engines

    return make


def step(engines, version=4) -> dict[str, float]:
    async def step():
        await engines.all_back()
        engines.overwrite()
        await engines.give_way()
        await engines.publish(version, [])
        back = await engines.come_back()
        await engines.score([[1]], version)
        engines.go_on()
        return back

    return asyncio.run(step())


def test_every_engine_gives_way_takes_the_version_and_comes_back(proven, tmp_path):
    engines = proven()
    back = step(engines)
    for index in range(2):
        assert asked(tmp_path, index) == ["give_way", "publish 4", "wake kv_cache", "probe 4"]
    assert back.pop("placement/given_back") == 3.0
    assert set(back) == {f"placement/{what}_seconds" for what in ("give_way", "come_back")}
    assert engines.phase is Phase.ROLLOUT


def test_weights_that_are_away_are_there_before_slots_are_written(proven, tmp_path):
    engines = proven(engines=1)
    placement = engines.config.placement.model_copy(update={"gives_back": "weights"})
    engines.config = engines.config.model_copy(update={"placement": placement})
    step(engines)
    told = ["give_way", "wake weights", "publish 4", "wake kv_cache", "probe 4"]
    assert asked(tmp_path, 0) == told


def test_engines_with_devices_of_their_own_are_told_nothing(proven, tmp_path):
    assert step(proven("split", engines=1)) == {}
    assert asked(tmp_path, 0) == ["publish 4", "probe 4"]


def test_a_skipped_update_writes_no_slot(proven, tmp_path):
    engines = proven(engines=1)

    async def skipped():
        await engines.give_way()
        await engines.come_back()
        engines.go_on()

    asyncio.run(skipped())
    assert asked(tmp_path, 0) == ["give_way", "wake kv_cache"]


def test_requests_end_before_and_begin_after(proven, tmp_path):
    engines = proven(engines=1)
    fate(tmp_path, 0, "sample", "slow")

    async def meanwhile():
        early = asyncio.create_task(engines.policy(3, seed=0).sample([0], n=1))
        while not any(engines.rolling):
            await asyncio.sleep(0.01)
        give = asyncio.create_task(engines.give_way())
        await asyncio.sleep(0)
        late = asyncio.create_task(engines.policy(3, seed=1).sample([1], n=1))
        judged = asyncio.create_task(engines.write([5], 1, 0.0, 0))
        await give
        assert early.done() and not late.done() and not judged.done()
        await engines.publish(4, [])
        await engines.come_back()
        assert not late.done() and not judged.done()
        engines.go_on()
        await asyncio.gather(late, judged)

    asyncio.run(meanwhile())
    told = asked(tmp_path, 0)
    assert told[:4] == ["sample [0] 3 0", "give_way", "publish 4", "wake kv_cache"]
    assert sorted(told[4:]) == ["sample [1] 3 1", "write [5]"]


def test_what_requests_wait_for_is_measured_and_nothing_else(proven, tmp_path):
    engines = proven(engines=1)

    async def meanwhile():
        policy = engines.policy(3, seed=0)
        await policy.sample([0], n=1)
        answered = policy.held_up()
        await engines.give_way()
        await asyncio.sleep(0.3)  # the update; nobody asks
        assert policy.held_up() == answered
        waiting = [asyncio.create_task(policy.sample([i], n=1)) for i in range(2)]
        await asyncio.sleep(0.5)
        before = policy.held_up()  # the wait that goes on counts, and of two that of one
        await engines.publish(4, [])
        await engines.come_back()
        engines.go_on()
        await asyncio.gather(*waiting)
        return answered, before, policy.held_up()

    answered, before, after = asyncio.run(meanwhile())
    assert answered < 0.2 and 0.45 < before - answered < 0.9 and after >= before


def test_an_engine_that_is_started_anew_keeps_requests_waiting(proven, tmp_path):
    """The ticket begins again, and waits: of no time-out of an agent's."""
    engines = proven("split", engines=1)
    fate(tmp_path, 0, "sample", "exit")

    async def meanwhile():
        policy = engines.policy(3, seed=0)
        with pytest.raises(EngineDied):
            await policy.sample([0], n=1)
        died, begun = policy.held_up(), time.monotonic()
        await policy.sample([0], n=1)
        return policy.held_up() - died, time.monotonic() - begun

    held_up, waited = asyncio.run(meanwhile())
    assert engines.restarts == 1 and 0.5 * waited < held_up <= waited


@pytest.mark.parametrize("method", ["give_way", "publish", "wake"])
def test_one_that_dies_over_it_is_started_anew_and_asked_again(proven, tmp_path, method):
    engines = proven()
    fate(tmp_path, 1, method, "exit")
    step(engines)
    told = asked(tmp_path, 1)
    assert engines.restarts == 1 and told.count("start") == 1
    assert [line.split()[0] for line in told].count(method) >= 2
    assert told[-2:] == ["wake kv_cache", "probe 4"]
    assert asked(tmp_path, 0) == ["give_way", "publish 4", "wake kv_cache", "probe 4"]


def test_what_comes_out_of_turn_is_refused(proven):
    engines = proven()
    with pytest.raises(OutOfTurn, match="'write' has no place in the phase 'rollout'"):
        asyncio.run(engines.publish(4, []))  # nobody has given way to an update
    asyncio.run(engines.give_way())
    with pytest.raises(OutOfTurn, match="'score' has no place in the phase 'train'"):
        asyncio.run(engines.score([[1]], 3))
    with pytest.raises(OutOfTurn, match="'go on' has no place in the phase 'train'"):
        engines.go_on()
