"""Processes as they are seen from outside, and faults that are brought about in them."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from lora_moe_rl.chaos import inject
from lora_moe_rl.chaos.child import Child, alive, stopped

NESTED = "import subprocess; subprocess.run(['sleep', '100'])"
SLEEPS = [sys.executable, "-c", "import time; time.sleep(100)"]


@pytest.fixture
def sleeper():
    process = psutil.Popen(SLEEPS)
    yield process
    process.kill()
    process.wait()


def until(condition) -> bool:
    for _ in range(2000):
        if condition():
            return True
        subprocess.run(["sleep", "0.01"])
    return False


def test_a_kill_and_a_stop_have_happened_when_the_kernel_says_so(sleeper):
    halted = inject._stop([sleeper])
    assert halted and until(halted.happened) and stopped(sleeper) and alive(sleeper)
    killed = inject._kill(sleeper)
    assert killed and until(killed.happened) and not alive(sleeper)
    assert str(sleeper.pid) in killed.who


def test_nobody_there_is_no_fault():
    assert inject._kill(None) is None and inject._stop([]) is None


def test_a_rank_is_asked_and_has_had_it_when_it_says_so(tmp_path):
    (tmp_path / "nan.grad.done").touch()  # of an earlier one
    asked = inject._ask(inject.Scene(None, tmp_path, tmp_path), "nan.grad")  # type: ignore[arg-type]
    assert (tmp_path / "nan.grad.asked").exists() and not asked.happened()
    (tmp_path / "nan.grad.asked").rename(tmp_path / "nan.grad.done")
    assert asked.happened()


def test_an_actor_is_who_writes_its_log_and_was_not_started_by_it(tmp_path):
    """A child of the run writes engine-0.log, and so does what it has started in turn."""
    code = (
        "import subprocess, sys, time\n"
        f"p = [subprocess.Popen([sys.executable, '-c', {NESTED!r}], stdout=open(f, 'w'))"
        " for f in sys.argv[1:]]\n"
        "time.sleep(100)"
    )
    logs = [str(tmp_path / f"{name}.log") for name in ("trainer-0", "engine-1", "engine-0")]
    child = Child.__new__(Child)
    child.process, child.seen = psutil.Popen([sys.executable, "-c", code, *logs]), set()
    try:
        assert until(lambda: len(child.tree()) == 6)
        engines = child.actors("engine")
        assert len(engines) == 2 and len(child.actors("trainer")) == 1
        pids = {process.pid for process in child.process.children()}
        assert {process.pid for process in engines} <= pids
        assert [inject._one(engines, victim) for victim in (0, 3)] == engines
        assert child.scorers() == [] and child.controllers() == []
    finally:
        child.end()
    assert child.leftovers() == []


def test_what_outlives_a_run_is_told(sleeper, monkeypatch):
    child = Child.__new__(Child)
    child.seen = {sleeper}
    monkeypatch.setattr("lora_moe_rl.chaos.child.END_S", 0.1)
    assert [one.split()[0] for one in child.leftovers()] == [str(sleeper.pid)]
