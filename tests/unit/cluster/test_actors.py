"""What a failing call on several actors is reported as: the one that is to blame, by name."""

import asyncio
import os
import platform
import signal
import time

import pytest
import ray
from ray._private.serialization import SerializationContext

from lora_moe_rl.cluster.actors import Actor, answers, get
from lora_moe_rl.cluster.ray_start import RAY_STARTS, init_ray
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ActorFailed, ClusterError, ConfigError, RefitError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run.own_ray import OwnRay

# Whether the kernel tells how a process ended to others than its parent.
TELLS = tuple(map(int, platform.release().split("-")[0].split(".")[:2])) >= (6, 15)
NAMES = ("trainer-0", "trainer-1")


class Rank:
    def niceness(self) -> int:
        return os.nice(0)

    def act(self, deed: str, seconds: float = 0.0) -> str:
        time.sleep(seconds)
        if deed == "die":
            os._exit(1)
        if deed == "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "raise":
            raise RuntimeError("connection closed by peer")
        if deed == "ours":
            raise RefitError("version 3 is not served")
        return deed


pytestmark = [pytest.mark.seconds, pytest.mark.usefixtures("ray_session")]


@pytest.fixture
def actors(tmp_path):
    with RunDir(RunConfig(logging={"run_dir": str(tmp_path / "run")}), False) as run_dir:
        for name in NAMES:
            run_dir.log_path(name).write_text(f"last words of {name}\n")
        actors = [Actor(ray.remote(num_cpus=0)(Rank).remote(), name, run_dir) for name in NAMES]
        ray.get([actor.remote("act", "start") for actor in actors])
        yield actors
        for actor in actors:
            ray.kill(actor.handle)


def act(actors, *deeds, timeout=None):
    refs = [actor.remote("act", *deed) for actor, deed in zip(actors, deeds, strict=True)]
    return get(actors, refs, timeout)


def test_an_actor_has_the_priority_of_the_run(actors):
    assert get(actors[:1], [actors[0].remote("niceness")]) == [os.nice(0)]


def test_results_come_in_the_order_of_the_actors(actors):
    assert act(actors, ("late", 0.3), ("early",)) == ["late", "early"]


@pytest.mark.parametrize("waits", [get, lambda *given: asyncio.run(answers(*given))])
def test_a_result_is_unpacked_once(actors, monkeypatch, waits):
    unpacked, unpack = [], SerializationContext._deserialize_object

    def counted(context, data, metadata, ref, *more):
        unpacked.append(ref)
        return unpack(context, data, metadata, ref, *more)

    monkeypatch.setattr(SerializationContext, "_deserialize_object", counted)
    refs = [actor.remote("act", name) for actor, name in zip(actors, NAMES, strict=True)]
    assert waits(actors, refs) == list(NAMES)
    # Where an actor is may be told meanwhile.
    assert sorted(ref.hex() for ref in unpacked if ref in refs) == sorted(ref.hex() for ref in refs)


def test_the_dead_one_is_named_even_when_its_peer_complains_first(actors):
    with pytest.raises(ActorFailed, match="actor trainer-1 failed: .*died") as caught:
        act(actors, ("raise",), ("die", 0.5))
    assert caught.value.log_tail == "last words of trainer-1"


def test_a_run_leaves_the_ray_alone_that_somebody_else_has_started(monkeypatch):
    """In a notebook, or in these tests: it neither takes it over nor ends it."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for begin in (OwnRay.begin, OwnRay.wait):
        with (
            pytest.raises(ConfigError, match="Ray runs in this process already"),
            OwnRay(RunConfig()) as own_ray,
        ):
            begin(own_ray)
    assert ray.is_initialized() and ray.get(ray.put(7)) == 7


@pytest.mark.parametrize(("deed", "end"), [("die", "exit code 1"), ("be killed", "signal SIGKILL")])
def test_the_message_says_how_a_process_ended(actors, deed, end):
    with pytest.raises(ActorFailed) as caught:
        act(actors, ("fine",), (deed, 0.5))
    assert (f"({end})" if TELLS else "(Worker unexpectedly exits") in caught.value.reason


def test_a_failure_does_not_wait_for_the_others(actors):
    started = time.monotonic()
    with pytest.raises(ActorFailed, match="actor trainer-0 failed: connection closed by peer"):
        act(actors, ("raise",), ("slow", 60))
    assert time.monotonic() - started < 15


def test_our_own_errors_are_raised_as_they_are(actors):
    with pytest.raises(RefitError, match=r"^version 3 is not served$"):
        act(actors, ("raise",), ("ours", 0.3))


def test_silence_names_the_silent(actors):
    with pytest.raises(ActorFailed, match=r"actor trainer-1 failed: no answer within 1 s"):
        act(actors, ("fine",), ("slow", 60), timeout=1)


@pytest.mark.parametrize("failures", [2, 3])
def test_ray_that_does_not_start_is_tried_again_a_few_times(monkeypatch, failures):
    calls = []

    def start(**options):
        calls.append(options)
        if len(calls) <= failures:
            raise Exception("The current node timed out during startup. This could happen\nbecause")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if failures < RAY_STARTS:
        init_ray(num_cpus=7)
    else:
        with pytest.raises(ClusterError, match="in 3 attempts: The current node timed out"):
            init_ray(num_cpus=7)
    assert calls == [{"num_cpus": 7}] * 3
