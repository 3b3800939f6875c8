"""Ray starts beside the last of what is looked at, and ends whatever comes of that."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import pytest
import ray

from lora_moe_rl import config
from lora_moe_rl.cluster import ray_start
from lora_moe_rl.errors import ClusterError, DataError
from lora_moe_rl.run import start
from lora_moe_rl.run.own_ray import OwnRay

SETTINGS = config.RunConfig()


@pytest.fixture
def calls(monkeypatch):
    """What is called, in turn; Ray itself is not."""
    found = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_start, "prepare_ray", lambda: found.append("prepare"))
    monkeypatch.setattr(ray_start, "start_ray", lambda actors: found.append(f"start {actors}"))
    monkeypatch.setattr(ray, "shutdown", lambda: found.append("end"))
    return found


def test_it_starts_once_and_ends(calls):
    with OwnRay(SETTINGS) as own_ray:
        own_ray.begin()
        own_ray.wait()
        own_ray.wait()
    assert calls == ["prepare", f"start {SETTINGS.trainer.world_size + 1}", "end"]


def test_its_processes_hear_of_no_terminal_that_is_closed(calls, monkeypatch):
    """They would die at once, and the run before the end of its step."""
    blocked = []
    mask = signal.pthread_sigmask
    seen = lambda actors: blocked.append(mask(signal.SIG_BLOCK, ()))  # noqa: E731
    monkeypatch.setattr(ray_start, "start_ray", seen)
    with OwnRay(SETTINGS) as own_ray:
        own_ray.wait()
    assert signal.SIGHUP in blocked[0] and signal.SIGHUP not in mask(signal.SIG_BLOCK, ())


def test_what_nobody_began_has_nothing_to_end(calls):
    with OwnRay(SETTINGS):
        pass
    assert calls == []


def test_a_cluster_is_joined_when_it_is_waited_for_and_no_sooner(calls, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    with OwnRay(SETTINGS) as own_ray:
        own_ray.begin()
        assert calls == []
        own_ray.wait()
        assert len(calls) == 2


def test_what_kept_it_from_starting_is_raised_where_it_is_waited_for(calls, monkeypatch):
    def fails(actors):
        raise ClusterError("the disk is full")

    monkeypatch.setattr(ray_start, "start_ray", fails)
    with OwnRay(SETTINGS) as own_ray:
        own_ray.begin()
        with pytest.raises(ClusterError, match="the disk is full"):
            own_ray.wait()


def test_what_has_started_it_stays_as_long_as_it(calls, monkeypatch):
    """Or else the kernel kills what that has started."""
    threads = []
    here = threading.current_thread
    monkeypatch.setattr(ray_start, "start_ray", lambda actors: threads.append(here()))
    with OwnRay(SETTINGS) as own_ray:
        own_ray.begin()
        own_ray.wait()
        time.sleep(0.2)
        assert threads[0].is_alive()
    assert not threads[0].is_alive()


class Ready:
    """A preflight whose last step goes on while Ray starts, and fails in the end if it is to."""

    def __init__(self, calls: list[str], error: Exception | None):
        self.calls, self.error = calls, error

    def require(self, say, begin):
        for step in ("model", "prompts"):
            begin(step)
            self.calls.append(step)
        if self.error:
            raise self.error


def test_it_starts_beside_the_last_step_alone(calls, monkeypatch):
    last = threading.Event()

    def starts(actors):
        assert last.wait(10)  # for the last step: it would hang if that came after
        calls.append("started")

    monkeypatch.setattr(ray_start, "start_ray", starts)
    with OwnRay(SETTINGS) as own_ray:
        start._look(Ready(calls, None), own_ray)
        last.set()
        own_ray.wait()
    assert calls == ["model", "prepare", "prompts", "started", "end"]


def test_prompts_that_are_refused_leave_no_ray(calls):
    with pytest.raises(DataError, match="no row"), OwnRay(SETTINGS) as own_ray:
        start._look(Ready(calls, DataError("no row")), own_ray)
    assert calls[-1] == "end"


def test_a_run_that_has_not_begun_imports_no_ray():
    program = "import sys, lora_moe_rl.run.start; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
