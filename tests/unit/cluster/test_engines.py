"""Engines that die are started anew: in which order, how often, and which errors are no death."""

from __future__ import annotations

import asyncio
import pickle

import pytest
import ray
from engine_group import asked, fate, sample

from lora_moe_rl.errors import (
    ActorFailed,
    EngineDied,
    EngineLost,
    NotServed,
    RefitError,
)
from lora_moe_rl.ports import Manner, Turn, Written

pytestmark = pytest.mark.seconds  # Ray is started for them
TURN = Turn(conversation=0, number=0, recorded=0, max_tokens=5)


def test_tickets_go_to_the_engine_with_the_least_to_do(start, tmp_path):
    answers, given_back = sample(start())
    assert [routes for _, routes in answers] == ["table-0", "table-1"] * 2 and not given_back
    assert sorted(asked(tmp_path, 0)) == ["sample [0] 3 0", "sample [2] 3 2"]


def test_a_conversation_goes_on_where_its_tokens_are_unless_that_has_clearly_more_to_do(
    start, tmp_path
):
    engines = start()
    policy = engines.policy(3, seed=0)

    def turn(place, number):
        return policy.sample([place], 1, Turn(place, number, recorded=0, max_tokens=5))

    async def talk():
        await asyncio.gather(*(turn(place, 0) for place in range(4)))
        for number in (1, 2):
            for place in (3, 1, 2, 0):
                await turn(place, number)
        engines.rolling[0] += 2
        await turn(0, 3)

    asyncio.run(talk())
    places = [[line.split()[1] for line in asked(tmp_path, index)] for index in (0, 1)]
    assert sorted(places[0]) == ["[0]"] * 3 + ["[2]"] * 3
    assert sorted(places[1]) == ["[0]"] + ["[1]"] * 3 + ["[3]"] * 3


def test_what_is_asked_again_without_a_turn_is_sampled_anew(start, tmp_path):
    engines = start(engines=1)

    async def twice(ticket):
        policy = engines.policy(3, seed=ticket)
        for _ in range(2):
            await policy.sample([7], 1)

    for _ in range(2):
        asyncio.run(twice(5))
    seeds = [line.split()[3] for line in asked(tmp_path, 0)]
    assert seeds[0] == "5" != seeds[1] and seeds[:2] == seeds[2:]


def test_once_requests_have_moved_on_none_begins_under_an_older_version(start, tmp_path):
    engines = start()

    async def tickets_of_version_3():
        await engines.move_on(5)
        asked = (engines.policy(3, seed=seed).sample([seed], n=2) for seed in range(2))
        return await asyncio.gather(*asked)

    asyncio.run(tickets_of_version_3())
    assert asked(tmp_path, 0) == ["move_on 5", "sample [0] 5 0"]
    assert asked(tmp_path, 1) == ["move_on 5", "sample [1] 5 1"]


@pytest.mark.parametrize("how", ["exit", "dead"])
def test_an_engine_that_dies_as_requests_move_on_comes_back_once(start, tmp_path, how):
    engines = start()
    fate(tmp_path, 1, "move_on", how)

    async def move_on():
        await engines.move_on(3)
        await engines.all_back()

    asyncio.run(move_on())
    assert asked(tmp_path, 1) == ["move_on 3", "start", "prepare_refit", "publish 3"]
    assert engines.restarts == 1 and engines.proven == [(1, 3)]


def test_an_engine_that_does_not_serve_the_version_stops_the_move(start, tmp_path):
    engines = start()
    fate(tmp_path, 1, "move_on", "refuse")
    with pytest.raises(RefitError, match="no"):
        asyncio.run(engines.move_on(3))
    assert engines.restarts == 0


def test_texts_of_the_base_are_shared_by_the_engines_and_one_that_dies_is_an_error(start, tmp_path):
    engines = start()

    async def both():
        return await asyncio.gather(*(engines.write([n], 5, 1.0, 0) for n in range(2)))

    texts = [Written("by engine-0", "stop", 5), Written("by engine-1", "stop", 5)]
    assert asyncio.run(both()) == texts
    fate(tmp_path, 0, "write", "dead")
    with pytest.raises(EngineDied):
        asyncio.run(engines.write([7], 5, 1.0, 0))
    assert engines.rolling == [0, 0] and engines.restarts == 0


@pytest.mark.parametrize("how", ["exit", "dead"])
def test_an_engine_that_dies_gives_its_tickets_back_and_is_served_and_proven(start, tmp_path, how):
    engines = start()
    fate(tmp_path, 1, "sample", how)
    _, given_back = sample(engines)
    assert given_back >= 1
    restart = asked(tmp_path, 1).index("start")
    assert asked(tmp_path, 1)[restart : restart + 3] == ["start", "prepare_refit", "publish 3"]
    assert engines.proven == [(1, 3)] and engines.restarts == 1


def test_an_engine_that_comes_back_is_told_what_is_pinned(start, tmp_path):
    engines = start()
    asyncio.run(engines.pin(3))
    assert asked(tmp_path, 0)[-1] == asked(tmp_path, 1)[-1] == "pin 3"
    fate(tmp_path, 1, "sample", "exit")
    sample(engines)
    restart = asked(tmp_path, 1).index("start")
    assert asked(tmp_path, 1)[restart : restart + 4] == [
        *("start", "prepare_refit", "pin 3", "publish 3")
    ]


def test_a_version_is_lost_when_only_newer_ones_came_back(start):
    engines = start()
    assert not engines.lost(3)
    asyncio.run(engines.publish(4, []))
    assert not engines.lost(3)  # both may still hold it
    engines.oldest[0] = 4
    assert not engines.lost(3)
    engines.oldest[1] = 4
    assert engines.lost(3) and not engines.lost(4)


def test_tickets_wait_for_the_only_engine(start, tmp_path):
    engines = start(engines=1)
    fate(tmp_path, 0, "sample", "exit")
    _, given_back = sample(engines)
    assert given_back >= 1 and engines.restarts == 1 and engines.proven == [(0, 3)]


def test_a_publish_in_flight_is_repeated_and_the_old_version_is_not(start, tmp_path):
    """The parts of the version before are written over by then. The run proves the new one."""
    engines = start()
    fate(tmp_path, 0, "publish", "dead")
    receipts = asyncio.run(engines.publish(4, []))
    assert receipts == [("publish", (4,))] * 2
    assert asked(tmp_path, 0) == ["publish 4", "start", "prepare_refit", "publish 4"]
    assert asked(tmp_path, 1) == ["publish 4"]
    assert engines.proven == [] and engines.restarts == 1
    fate(tmp_path, 1, "sample", "exit")
    sample(engines)
    assert "publish 4" in asked(tmp_path, 1)[2:] and engines.proven == [(1, 4)]


def test_an_engine_that_comes_back_while_parts_are_written_waits_for_the_next(start, tmp_path):
    """Between the trainer's update and the next publish there is nothing that it could take."""
    engines = start(engines=1)
    fate(tmp_path, 0, "sample", "exit")

    async def dies_during_an_update():
        engines.overwrite()
        with pytest.raises(EngineDied):
            await engines.policy(3, seed=0).sample([0], n=2)
        await engines.all_back()
        assert "publish 3" not in asked(tmp_path, 0) and engines.empty == {0}
        late = asyncio.create_task(engines.policy(3, seed=0).sample([0], n=2))
        await engines.publish(4, [])
        with pytest.raises(EngineDied, match="no engine serves version 3 any more"):
            await late
        return await engines.policy(4, seed=0).sample([0], n=2)

    ((_, args), _) = asyncio.run(dies_during_an_update())
    assert args == ([0], 4, 0) and engines.empty == set() and engines.proven == []


@pytest.mark.parametrize("when", ["update", "rollout"])
def test_an_engine_that_dies_around_an_update_that_made_no_version_takes_the_old_one(
    start, tmp_path, when
):
    """A step that was skipped, or one of a critic's warm-up: nothing new is published."""
    engines = start(engines=1)

    async def an_update():
        engines.overwrite()
        if when == "update":
            fate(tmp_path, 0, "sample", "exit")
            with pytest.raises(EngineDied):
                await engines.policy(3, seed=0).sample([0], n=2)
        assert await engines.keep(3, []) == ([0] if when == "update" else [])
        if when == "rollout":
            fate(tmp_path, 0, "sample", "exit")

    asyncio.run(an_update())
    _, given_back = sample(engines)
    assert asked(tmp_path, 0).count("publish 3") == 1 and engines.restarts == 1
    assert bool(given_back) == (when == "rollout") and engines.empty == set()


def test_an_engine_that_dies_again_while_it_starts_counts_twice(start, tmp_path):
    engines = start(engines=1)
    fate(tmp_path, 0, "probe", "dead")
    fate(tmp_path, 0, "publish", "exit")
    (found,) = asyncio.run(engines.score([[1]], 3))
    assert found.logprobs == ("probe", (3,)) and engines.restarts == 2
    assert found.checksum == "checksum" and found.complete and ray.get(found.routes) == "table-0"


def test_what_engines_hold_otherwise_than_sent_is_named_once(start):
    engines = start()
    assert asyncio.run(engines.differing(3, [])) == ["tensor", "tensor-0", "tensor-1"]
    assert asyncio.run(engines.differing(3, [], [1])) == ["tensor", "tensor-1"]


def test_beyond_the_bound_the_run_stops(start, tmp_path):
    engines = start(engines=1, max_restarts=1)
    fate(tmp_path, 0, "probe", "dead", "exit")
    with pytest.raises(ActorFailed, match="rollout.max_restarts=1 allows no more") as info:
        asyncio.run(engines.score([[1]], 3))
    assert info.value.actor == "engine-0" and "--resume" in str(info.value)
    assert "tail of engine-0" in str(info.value)
    assert asked(tmp_path, 0).count("start") == 1


@pytest.mark.timeout(60)
def test_who_waits_for_a_version_of_a_lost_engine_is_told_so(start, tmp_path):
    """It came back during an update, with no version, and is lost over the next one."""
    engines = start(engines=1, max_restarts=1)
    fate(tmp_path, 0, "sample", "exit")
    fate(tmp_path, 0, "publish", "exit")

    async def lost():
        engines.overwrite()
        with pytest.raises(EngineDied):
            await engines.policy(3, seed=0).sample([0], n=2)
        await engines.all_back()
        late = asyncio.create_task(engines.policy(3, seed=0).sample([0], n=2))
        with pytest.raises(EngineLost):
            await engines.publish(4, [])
        with pytest.raises(EngineLost, match="rollout.max_restarts=1 allows no more"):
            await asyncio.wait_for(late, 20)

    asyncio.run(lost())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("method", ["sample", "say"])
def test_what_nobody_waits_for_any_more_the_engine_gives_up(start, tmp_path, method):
    engines = start(engines=1)
    fate(tmp_path, 0, method, "idle")

    async def given_up():
        policy = engines.policy(3, seed=0)
        asked_of = policy if method == "sample" else policy.beside(None, Manner())
        waiting = asyncio.create_task(asked_of.sample([0], 1, TURN))
        while (tmp_path / f"fate-0-{method}").read_text():
            await asyncio.sleep(0.01)
        waiting.cancel()
        while not (tmp_path / "asked-0").exists():
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(given_up())
    assert asked(tmp_path, 0) == [f"gave {method} up"]
    assert engines.rolling == [0] and engines.restarts == 0


def test_other_models_are_asked_with_seeds_of_their_own(start, tmp_path):
    engines = start(engines=1)

    async def every():
        policy = engines.policy(3, seed=0)
        for one in (policy, *(policy.beside(version, Manner()) for version in (None, 3, 2))):
            await one.sample([7], 1, TURN)
        await policy.beside(None, Manner(seed=5)).sample([7], 1, TURN)

    asyncio.run(every())
    told = [line.split() for line in asked(tmp_path, 0)]
    assert [line[:3] for line in told[1:]] == [
        ["say", "[7]", v] for v in ("None", "3", "2", "None")
    ]
    assert len({line[3] for line in told}) == 5 and told[-1][3] == "5"


def test_the_samples_of_one_request_are_one_engines_and_weigh_as_many(start, tmp_path):
    """Each has its own of the parts that stand beside."""
    engines = start()

    async def together():
        many = asyncio.create_task(engines.sample_each([7], 3, [5, 6, 7], Manner(max_tokens=4)))
        await asyncio.sleep(0)
        rolling = list(engines.rolling)
        prompts = (engines.score_prompt([8], version, 2) for version in (None, 3))
        return await asyncio.gather(*prompts), await many, rolling

    scored, told, rolling = asyncio.run(together())
    assert rolling == [3, 0] and engines.rolling == [0, 0]
    assert asked(tmp_path, 0) == ["sample_each [7] 3 [5, 6, 7]"]
    wanted = [("score_prompt", ([8], version, 2)) for version in (None, 3)]
    assert scored == wanted and len(asked(tmp_path, 1)) == 2
    parts = [(one, sent.blocks[0].parts[0]) for one, sent in told]
    assert parts == [(f"told-{seed}", f"table-{seed}") for seed in (5, 6, 7)]


@pytest.mark.parametrize("method", ["sample_each", "score_prompt"])
def test_a_version_that_no_engine_has_is_not_sampled_or_scored(start, tmp_path, method):
    engines = start()
    engines.oldest[:] = [3, 3]
    more = ([5], Manner(max_tokens=4)) if method == "sample_each" else ()
    with pytest.raises(NotServed, match="adapter version 2 any more"):
        asyncio.run(getattr(engines, method)([7], 2, *more))
    fate(tmp_path, 0, method, "dead")
    with pytest.raises(EngineDied):
        asyncio.run(getattr(engines, method)([7], None, *more))
    assert engines.rolling == [0, 0] and engines.restarts == 1


def test_a_version_that_no_engine_has_any_more_is_not_served(start, tmp_path):
    engines = start()
    engines.oldest[:] = [3, 3]
    with pytest.raises(NotServed, match="adapter version 2 any more") as info:
        asyncio.run(engines.policy(3, seed=0).beside(2, Manner()).sample([7], 1, TURN))
    assert info.value.served == (3,) and engines.restarts == 0
    again = pickle.loads(pickle.dumps(info.value))
    assert str(again) == str(info.value) and again.served == (3,)


def test_what_is_no_death_stops_the_run(start, tmp_path):
    engines = start(engines=1)
    fate(tmp_path, 0, "publish", "refuse")
    with pytest.raises(RefitError, match="no"):
        asyncio.run(engines.publish(4, []))
    assert engines.restarts == 0


def renewing(engines, parts, answer=True) -> None:
    """The senders of `parts` have died, if `answer`; others are started in their places."""

    async def renew() -> bool:
        parts[:] = ["new"] if answer else parts
        return answer

    engines.renew = renew


def test_an_engine_that_could_not_take_parts_of_a_dead_sender_takes_the_new_ones(start, tmp_path):
    engines, parts = start(), ["old"]
    renewing(engines, parts)
    fate(tmp_path, 0, "publish", "refuse")
    asyncio.run(engines.publish(4, parts))
    assert asked(tmp_path, 0) == ["publish 4 old", "publish 4 new"]
    assert asked(tmp_path, 1) == ["publish 4 old"] and engines.restarts == 0
    fate(tmp_path, 1, "sample", "exit")
    fate(tmp_path, 1, "publish", "refuse")
    parts[:] = ["old"]
    sample(engines)
    assert [line for line in asked(tmp_path, 1) if "publish" in line][1:] == [
        "publish 4 old",
        "publish 4 new",
    ]
    assert engines.proven == [(1, 4)] and engines.restarts == 1


def test_an_engine_that_refuses_parts_of_living_senders_stops_the_run(start, tmp_path):
    engines, parts = start(engines=1), ["old"]
    renewing(engines, parts, answer=False)
    fate(tmp_path, 0, "publish", "refuse")
    with pytest.raises(RefitError, match="no"):
        asyncio.run(engines.publish(4, parts))
    assert asked(tmp_path, 0) == ["publish 4 old"]
