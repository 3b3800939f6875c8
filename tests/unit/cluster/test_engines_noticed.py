"""A death of an engine that several notice, while versions are published and proven."""

from __future__ import annotations

import asyncio

import pytest
from engine_group import asked, fate

from lora_moe_rl.errors import EngineDied, EngineLost

pytestmark = pytest.mark.seconds  # Ray is started for them


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("method", ["publish", "probe"])
def test_a_death_that_several_notice_is_one(start, tmp_path, engines, method):
    """With schedule.lag samples are under way while a version is published and proven."""
    made = start(engines=engines, max_restarts=1)
    for index in range(engines):
        fate(tmp_path, index, "sample", "idle")
    fate(tmp_path, 0, method, "exit")

    async def go():
        samples = [
            asyncio.create_task(made.policy(3, seed=seed).sample([seed], n=2))
            for seed in range(engines)
        ]
        await asyncio.sleep(0.5)
        await made.publish(4, [])
        found = await made.score([[1, 2]], 4)
        for one in samples:
            one.cancel()
        await asyncio.gather(*samples, return_exceptions=True)
        await made.all_back()
        return found

    assert len(asyncio.run(go())) == engines
    assert made.restarts == 1 and made.given_up is None


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("method", ["probe", "differing"])
def test_no_ticket_goes_to_an_engine_that_is_being_started_for_a_proof(
    start, tmp_path, engines, method
):
    """It has the least to do, and would refuse: it has no version yet."""
    made = start(engines=engines)
    fate(tmp_path, 0, method, "exit")

    async def roll(seed, proof):
        while True:
            try:
                version = 4 if proof.done() else 3
                return await made.policy(version, seed=seed).sample([seed], n=2)
            except EngineDied:  # as the loop does
                await asyncio.sleep(0.05)

    async def go():
        await made.publish(4, [])
        asks = made.score([[1, 2]], 4) if method == "probe" else made.differing(4, [])
        proof, tickets = asyncio.create_task(asks), []
        while not proof.done():
            await asyncio.sleep(0.1)
            tickets.append(asyncio.create_task(roll(len(tickets), proof)))
        await proof
        return await asyncio.gather(*tickets)

    assert asyncio.run(go()) and made.restarts == 1


@pytest.mark.parametrize("method", ["publish", "probe", "differing"])
def test_an_engine_that_a_ticket_has_seen_die_is_asked_once_it_has_a_version(
    start, tmp_path, method
):
    """It is being started while the version is proven by the others."""
    made = start(engines=2)
    fate(tmp_path, 0, "sample", "exit")

    async def go():
        before = made.actors[0]
        with pytest.raises(EngineDied):
            await made.policy(3, seed=0).sample([0], n=2)
        while made.actors[0] is before:
            await asyncio.sleep(0.01)
        if method == "publish":
            await made._give(0, "publish", 4, [])
        elif method == "probe":
            assert len(await made.score([[1, 2]], 3)) == 2
        else:
            assert await made.differing(3, []) == ["tensor", "tensor-0", "tensor-1"]

    asyncio.run(go())
    assert asked(tmp_path, 0)[1:4] == ["start", "prepare_refit", "publish 3"]
    assert made.restarts == 1


def test_whoever_asks_an_engine_that_is_lost_is_told_so(start, tmp_path):
    """The one who noticed is not the only one: a version may be on its way to it."""
    made = start(engines=1, max_restarts=0)
    for method in ("sample", "publish", "probe"):
        fate(tmp_path, 0, method, "dead", "dead")

    async def go():
        for ask in (
            lambda: made.policy(3, seed=0).sample([0], n=2),
            lambda: made.publish(4, []),
            lambda: made.score([[1]], 3),
            lambda: made.policy(3, seed=0).sample([0], n=2),
        ):
            with pytest.raises(EngineLost, match="rollout.max_restarts=0 allows no more"):
                await ask()

    asyncio.run(go())
