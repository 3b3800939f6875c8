"""`bench gpu`: stages that go wrong in every way, and the others that go on beside them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest

from lora_moe_rl.bench.gpu import runner
from lora_moe_rl.bench.gpu.runner import Job, run_jobs

SCRIPT = Path(__file__).parents[2] / "helpers/fake_stage.py"
LONG = 60.0


def job(name: str, *how: str, limit_s: float = LONG, needs: tuple[str, ...] = ()) -> Job:
    return Job(name, (sys.executable, str(SCRIPT), *how), limit_s, needs)


def run(out: Path, *jobs: Job, budget_s: float = 600) -> dict[str, runner.Outcome]:
    return run_jobs(jobs, out, budget_s, say=lambda line: None)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_one_stage_of_each_kind_and_none_stops_the_next(tmp_path):
    outcomes = run(
        tmp_path,
        job("raises", "raises"),
        job("half", "half"),
        job("absent", "passes", needs=("json", "no_such_package", "no_such.part")),
        job("hangs", "hangs", limit_s=1.0),
        job("passes", "passes"),
    )
    assert {name: outcome["status"] for name, outcome in outcomes.items()} == {
        "raises": "failed",
        "half": "failed",
        "absent": "lacks packages no_such_package, no_such.part",
        "hangs": "out of time",
        "passes": "passed",
    }
    assert outcomes["raises"]["error"] == "RuntimeError: no such GPU"
    assert outcomes["raises"]["parts"] == outcomes["hangs"]["parts"] == {"first": 1}
    assert outcomes["half"]["error"].startswith("half.json is not there, or not JSON")
    assert outcomes["hangs"]["seconds"] < LONG
    assert json.loads((tmp_path / "results.json").read_text()) == outcomes


def test_a_part_that_raises_stops_no_other_part(tmp_path):
    outcome = run(tmp_path, job("stage", "part raises"))["stage"]
    assert outcome["status"] == "failed"
    assert outcome["error"] == "bad: ZeroDivisionError: division by zero"
    assert outcome["parts"]["good"] == {"figure": 2} and outcome["parts"]["after"] == {"figure": 3}
    assert "Traceback" in (tmp_path / "stage.log").read_text()


@pytest.mark.parametrize(("stays_s", "limit_s"), [("1", LONG), ("600", 2.0)])
def test_what_a_stage_leaves_behind_ends_with_it(tmp_path, stays_s, limit_s):
    """Children in sessions of their own, one without the mark: whether the stage ends by itself or
    is ended."""
    told = tmp_path / "children"
    outcome = run(tmp_path, job("stage", "leaves", str(told), stays_s, limit_s=limit_s))["stage"]
    assert outcome["status"] == ("passed" if limit_s == LONG else "out of time")
    assert "could_not_be_ended" not in outcome
    children = [int(word) for word in told.read_text().split()]
    assert len(children) == 2 and all(map(gone, children))


def test_a_stage_has_no_more_time_than_is_left_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "LEAST_S", 1.0)
    outcomes = run(tmp_path, job("hangs", "hangs"), job("next", "passes"), budget_s=2.0)
    assert [outcome["status"] for outcome in outcomes.values()] == ["out of time", "no time left"]
    assert outcomes["hangs"]["limit_s"] <= 2.0


def test_a_later_call_replaces_the_stages_that_it_names(tmp_path):
    run(tmp_path, job("one", "raises"), job("two", "raises"))
    run(tmp_path, job("two", "passes"))
    kept = json.loads((tmp_path / "results.json").read_text())
    assert {name: outcome["status"] for name, outcome in kept.items()} == {
        "one": "failed",
        "two": "passed",
    }


def test_an_interrupt_while_a_stage_is_started_ends_it(tmp_path, monkeypatch):
    begun, start = [], runner._start

    def interrupted(*args):
        begun.append(start(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, job("stage", "hangs"))
    assert begun[0].wait(timeout=10) != 0


def test_results_are_written_after_each_stage_and_an_interrupt_ends_the_one_that_runs(
    tmp_path, monkeypatch
):
    told = tmp_path / "children"
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        if (tmp_path / "second.json").exists():
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(runner.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, job("first", "passes"), job("second", "leaves", str(told), "600"))
    kept = json.loads((tmp_path / "results.json").read_text())
    assert list(kept) == ["first"] and kept["first"]["status"] == "passed"
    assert all(gone(int(word)) for word in told.read_text().split())
