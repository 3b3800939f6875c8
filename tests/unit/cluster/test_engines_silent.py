"""Engines that live and are silent: told from slow ones, started anew within their own bound."""

from __future__ import annotations

import asyncio

import pytest
from engine_group import asked, fate, sample

from lora_moe_rl.cluster import replicas as group
from lora_moe_rl.config.engines import RefitConfig
from lora_moe_rl.errors import ActorFailed, EngineSilent

pytestmark = pytest.mark.seconds  # Ray is started for them


def test_an_engine_that_lives_but_does_nothing_is_started_anew_and_proven(start, tmp_path):
    engines = start(silent_s=1.0)
    fate(tmp_path, 1, "sample", "idle")
    _, given_back = sample(engines)
    assert given_back >= 1
    restart = asked(tmp_path, 1).index("start")
    assert asked(tmp_path, 1)[restart : restart + 3] == ["start", "prepare_refit", "publish 3"]
    assert engines.proven == [(1, 3)] and engines.silences == engines.restarts == 1


def test_an_engine_that_is_slow_but_works_is_left_alone(start, tmp_path):
    engines = start(engines=1, silent_s=1.0)
    fate(tmp_path, 0, "sample", "slow")
    _, given_back = sample(engines)
    assert given_back == 0 and engines.restarts == 0


def test_silence_has_a_bound_of_its_own(start, tmp_path):
    engines = start(engines=1, silent_s=0.5, max_silences=1, max_restarts=1)
    fate(tmp_path, 0, "probe", "exit", "idle", "idle")
    with pytest.raises(ActorFailed, match="rollout.max_silences=1 allows no more") as info:
        asyncio.run(engines.score([[1]], 3))
    assert info.value.actor == "engine-0" and "rollout.silent_s=0.5 s" in str(info.value)
    assert (engines.restarts, engines.silences) == (2, 1)


@pytest.fixture
def impatient(start, monkeypatch):
    """An engine that may take half a second for a slot and again for its workers."""
    engines = start(engines=1, max_silences=1)
    monkeypatch.setattr(group, "REFIT_GRACE_S", 0)
    engines.config = engines.config.model_copy(update={"refit": RefitConfig(timeout_s=0.5)})
    return engines


@pytest.mark.parametrize("method", ["publish", "differing"])
def test_an_engine_that_is_silent_in_a_refit_is_started_anew_and_asked_again(
    impatient, tmp_path, method
):
    fate(tmp_path, 0, method, "sleep")
    asyncio.run(getattr(impatient, method)(4, []))
    told = [line.split()[0] for line in asked(tmp_path, 0)]
    proven = ["publish"] if method == "differing" else []  # version 3, which it had served
    assert told == [method, "start", "prepare_refit", *proven, method]
    assert impatient.silences == impatient.restarts == 1


@pytest.mark.timeout(60)
def test_an_engine_that_is_silent_as_it_comes_back_is_started_once_more(impatient, tmp_path):
    fate(tmp_path, 0, "differing", "exit")
    fate(tmp_path, 0, "prepare_refit", "sleep")
    asyncio.run(impatient.differing(3, []))
    assert [line.split()[0] for line in asked(tmp_path, 0)] == [
        "differing", *["start", "prepare_refit"] * 2, "publish", "differing",
    ]  # fmt: skip
    assert (impatient.silences, impatient.restarts) == (1, 2)


@pytest.mark.timeout(60)
def test_an_engine_that_is_silent_when_it_is_told_what_is_pinned_stops_nobody(impatient, tmp_path):
    fate(tmp_path, 0, "pin", "sleep")
    asyncio.run(asyncio.wait_for(impatient.pin(3), 30))
    assert impatient.restarts == 0


@pytest.mark.timeout(60)
def test_a_version_is_taken_back_from_an_engine_that_is_silent_in_time(impatient, tmp_path):
    fate(tmp_path, 0, "differing", "sleep")
    with pytest.raises(EngineSilent, match="no answer within 1 s"):
        asyncio.run(impatient.roll_back(3, []))


def test_an_engine_that_is_silent_in_each_refit_is_given_up(impatient, tmp_path):
    fate(tmp_path, 0, "publish", "sleep", "sleep")
    with pytest.raises(ActorFailed, match="no answer within 1 s; 1 restarts so far, and rollout"):
        asyncio.run(impatient.publish(4, []))


def test_an_engine_whose_workers_are_silent_in_a_refit_is_started_anew(start, tmp_path):
    engines = start(engines=1)
    fate(tmp_path, 0, "publish", "silent")
    asyncio.run(engines.publish(4, []))
    assert engines.silences == 1 and asked(tmp_path, 0)[-1] == "publish 4"
