"""Runs that end before their last step: by Ctrl-C, actors that are killed, a disk that refuses, a
metric that gets no better."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_run import RECIPE, ROOT, CliRun

from lora_moe_rl.files.checkpoint import newest_valid
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

INTERRUPTED = 130
END_S = 60  # longest time from the blow to the end of the run


@pytest.fixture
def start(tmp_path) -> Iterator:
    """Starts runs; what is left of them is ended with the test."""
    runs = []

    def start(*arguments: object) -> CliRun:
        runs.append(CliRun("train", *arguments, output=tmp_path / f"{len(runs)}.out"))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def steps_in(folder: Path) -> list[int]:
    return [record["step"] for record in read_jsonl(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[CliRun, int, Path]:
    """A run of the demo that met Ctrl-C in step 2 or later; its exit code and directory."""
    resolve_model("qwen3_moe")
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    settings = ("trainer.steps=100000", "checkpoint.every=0", f"logging.run_dir={folder}")
    run = CliRun("train", RECIPE, *settings, output=folder.with_suffix(".out"))
    try:
        run.wait_for(lambda: steps_in(folder), "the first step")
        run.interrupt()
        return run, run.finish(END_S), folder
    finally:
        run.end()


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint(interrupted):
    run, exit_code, folder = interrupted
    assert exit_code == INTERRUPTED
    steps = steps_in(folder)
    assert steps == list(range(1, len(steps) + 1))
    assert "stopping after this step, with a checkpoint; once more to stop at once" in run.output
    resume = f"go on with: lora-moe-rl train {folder}/config.yaml --resume"
    assert f"stopped after step {steps[-1]}; {resume}" in run.output
    found = newest_valid(folder / "checkpoints")
    assert found.metadata["step"] == steps[-1] and not found.skipped
    assert (folder / "adapter/adapter_model.safetensors").exists()
    assert (folder / "curves.png").exists()
    assert "Traceback" not in run.output and "error" not in run.output
    assert run.leftovers() == []


# vLLM's own process is spawned, and names itself only once it has started, if at all.
ENGINE_CORE = "EngineCore|multiprocessing.spawn"

# What is killed, by the log it writes and its name among the processes; the actor to be named.
VICTIMS = [
    pytest.param("engine-0", "ray::RolloutEngine", id="engine"),
    pytest.param("trainer-1", "ray::LoggedWorker", id="trainer rank"),
]


@pytest.mark.parametrize(("name", "title"), VICTIMS)
def test_a_killed_actor_ends_the_run_and_is_named(interrupted, start, name, title):
    """Each goes on from the interrupted run's checkpoint, which shows that too."""
    *_, folder = interrupted
    found = newest_valid(folder / "checkpoints")
    never = ("rollout.max_restarts=0", "trainer.max_restarts=0")
    run = start(folder / "config.yaml", "--resume", *never)
    run.wait_for(
        lambda: max(steps_in(folder)) > found.metadata["step"] and "step s" in run.output,
        "a step",
    )
    assert f"going on from {found.path}" in run.output
    victim = run.actor(name, title)
    victim.kill()
    killed = time.monotonic()
    assert run.finish(END_S) == 75
    print(f"ended {time.monotonic() - killed:.1f} s after the kill")
    assert not victim.is_running()

    assert f"error: actor {name} failed: " in run.output
    assert "Last lines of its log:" in run.output
    assert run.leftovers() == []
    steps = steps_in(folder)
    assert steps == list(range(1, len(steps) + 1)) and steps[-1] > found.metadata["step"]
    # The ranks, if they live, still write what they have trained.
    kept = steps[-1] if name == "engine-0" else found.metadata["step"]
    assert newest_valid(folder / "checkpoints").metadata["step"] == kept


def test_a_disk_that_refuses_one_ranks_file_leaves_the_earlier_checkpoint(interrupted, start):
    """The kernel refuses a write in the middle of the file, as when the disk is full: the run goes
    on, from what is there, and writes a checkpoint again once there is room."""
    *_, folder = interrupted
    root = folder / "checkpoints"
    found = newest_valid(root)
    first, before = found.metadata["step"], sorted(root.iterdir())
    run = start(
        *(folder / "config.yaml", "--resume"),
        *(f"checkpoint.every={first + 10}", f"trainer.steps={first + 25}"),
    )
    rank = run.wait_for(lambda: run.actor("trainer-1", "ray::LoggedWorker"), "a trainer")
    run.wait_for_text("trainer-1: device")
    _, hard = resource.prlimit(rank.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (100_000, hard))

    run.wait_for_text("warning: cannot write a checkpoint")
    refused = " ".join(run.output.split())
    assert "File too large" in refused and "stay valid" in refused
    assert sorted(root.iterdir()) == before
    assert newest_valid(root).metadata == found.metadata
    step = max(steps_in(folder))
    run.wait_for(lambda: max(steps_in(folder)) > step, "a step without a checkpoint")

    resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert run.finish() == 0
    assert "a checkpoint can be written again" in run.output
    assert newest_valid(root).metadata["step"] == first + 25
    assert "Unhandled error" not in run.output
    assert run.leftovers() == []


SLOW_REWARD = """
import time

def reward(completions, **columns):
    time.sleep(120)
    return [0.0] * len(completions)
"""


def test_the_second_ctrl_c_ends_a_step_at_once(start, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    folder = tmp_path / "run"
    run = start(
        *(RECIPE, "trainer.world_size=1", "trainer.ep=1", f"logging.run_dir={folder}"),
        *(f"reward.function={tmp_path}/slow.py:reward", "reward.timeout_s=200"),
    )
    run.wait_for_text("engine-0: vllm")
    time.sleep(5)  # into the reward of step 1
    run.interrupt()
    run.wait_for_text("once more to stop at once")
    run.interrupt()
    assert run.finish(timeout=20) == INTERRUPTED
    assert "error: interrupted" in run.output and "Traceback" not in run.output
    assert run.leftovers() == []
    assert steps_in(folder) == []


def test_ctrl_c_while_the_engines_start(start, tmp_path):
    run = start(RECIPE, f"logging.run_dir={tmp_path}/run")
    run.wait_for(lambda: run.actor("engine-0", ENGINE_CORE), "vLLM's own process")
    run.interrupt()
    assert run.finish(timeout=30) == INTERRUPTED
    assert "error: interrupted" in run.output and "Traceback" not in run.output
    assert run.leftovers() == []


def test_a_metric_that_gets_no_better_ends_the_run_well_and_a_larger_patience_goes_on(
    start, tmp_path
):
    """The loss falls, and its largest is asked for: the first checkpoint stays the best."""
    folder = tmp_path / "run"
    best = ("checkpoint.best_metric=loss/nll", "checkpoint.best_is=largest")
    every = ("checkpoint.every=2", "checkpoint.keep_best=1", "checkpoint.stop_after=2")
    settings = (*best, *every, "trainer.world_size=1", "trainer.ep=1")
    run = start(ROOT / "recipes/tiny_sft.py", *settings, f"logging.run_dir={folder}")
    assert run.finish() == 0
    told = " ".join(run.output.split())
    assert "ended after step 6: the last 2 checkpoints found loss/nll no better than" in told
    assert "its best, at step 2 (checkpoint.stop_after=2); to go on: --resume" in told
    assert steps_in(folder) == [*range(1, 7)] and (folder / "curves.png").exists()
    assert newest_valid(folder / "checkpoints").metadata["step"] == 6
    assert (folder / "checkpoints/step-000002").exists() and run.leftovers() == []

    again = start(folder / "config.yaml", "--resume")
    assert again.finish() == 0 and steps_in(folder) == [*range(1, 7)]
    assert "nothing is left to do: the last 2 checkpoints found loss/nll" in again.output

    more = start(folder / "config.yaml", "--resume", "checkpoint.stop_after=3")
    assert more.finish() == 0
    assert "ended after step 8: the last 3 checkpoints" in " ".join(more.output.split())
    assert steps_in(folder) == [*range(1, 9)]
