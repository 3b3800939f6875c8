"""Runs that come back by themselves: after a SIGKILL of the controller, and of an engine that is
silent; and one that is stuck, which says where."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from cli_run import RECIPE, CliRun
from safetensors.numpy import load_file

from lora_moe_rl.errors import FAULT
from lora_moe_rl.files.checkpoint import newest_step
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

HERE = Path(__file__).parent
STEPS = 6
SHARED_MEMORY = Path("/dev/shm")


def start(folder: Path, *settings: str) -> CliRun:
    resolve_model("qwen3_moe")
    arguments = (f"logging.run_dir={folder}", f"trainer.steps={STEPS}", "checkpoint.every=2")
    return CliRun("train", RECIPE, *arguments, *settings, output=folder.with_suffix(".out"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run in which nothing happens."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = start(folder)
    try:
        assert run.finish() == 0, run.output
    finally:
        run.end()
    return folder


def same(folder: Path, whole: Path) -> None:
    """Samples, order and adapter, to the last bit."""
    for name in ("samples.jsonl", "order.jsonl"):
        assert (folder / name).read_text() == (whole / name).read_text()
    ours, theirs = (load_file(f / "adapter/adapter_model.safetensors") for f in (folder, whole))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)


def test_a_killed_controller_goes_on_by_itself_and_leaves_nothing(whole, tmp_path):
    shared = set(SHARED_MEMORY.iterdir())
    run = start(tmp_path / "run", "--supervise")
    try:
        run.wait_for(lambda: newest_step(tmp_path / "run/checkpoints") >= 2, "a checkpoint")
        (controller,) = run.process.children()
        first_life = [controller, *controller.children(recursive=True)]
        controller.kill()
        run.wait_for_text("(signal SIGKILL); it is started again")
        assert not [process for process in first_life if process.is_running()]
        assert run.finish() == 0, run.output
    finally:
        run.end()
    print(run.output)
    assert run.leftovers() == []
    assert set(SHARED_MEMORY.iterdir()) <= shared
    assert "signal SIGKILL" in (tmp_path / "run/logs/supervisor.log").read_text()
    assert [r["step"] for r in read_jsonl(tmp_path / "run/metrics.jsonl")] == list(
        range(1, STEPS + 1)
    )
    same(tmp_path / "run", whole)


def test_an_engine_whose_core_is_stopped_is_replaced(whole, tmp_path):
    """vLLM's process is stopped; the actor around it answers as ever."""
    run = start(tmp_path / "run", "rollout.silent_s=30")
    try:
        core = run.wait_for(lambda: run.actor("engine-0", "EngineCore|spawn"), "vLLM's process")
        run.wait_for(lambda: list(read_jsonl(tmp_path / "run/metrics.jsonl")), "a step")
        core.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert run.finish() == 0, run.output
        print(f"{run.output}\nended {time.monotonic() - stopped:.0f} s after the stop")
    finally:
        run.end()
    assert "engine-0 is silent" in run.output and "of rollout.max_silences=2" in run.output
    records = list(read_jsonl(tmp_path / "run/metrics.jsonl"))
    assert records[-1]["rollout/restarts"] == 1
    assert not core.is_running() or core.status() == psutil.STATUS_ZOMBIE
    assert run.leftovers() == []
    same(tmp_path / "run", whole)


def test_a_run_that_is_stuck_ends_and_says_where_it_waits(tmp_path):
    run = start(
        tmp_path / "run",
        *(f"environment.name={HERE}/stuck_environment.py:Stuck", "reward.timeout_s=5"),
        "faults.stall_s=20",
    )
    try:
        assert run.finish() == FAULT, run.output
    finally:
        run.end()
    assert "nothing has happened for" in run.output
    assert "rollout > never_comes" in run.output and "scored groups (1)" in run.output
    logs = tmp_path / "run/logs"
    for name in ("controller", "trainer-0", "trainer-1", "engine-0"):
        assert "most recent call" in (logs / f"{name}.log").read_text() or name == "controller"
    assert "in never_comes" in (logs / "controller.log").read_text()
    assert run.leftovers() == []
