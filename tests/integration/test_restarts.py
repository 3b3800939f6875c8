"""Engines that die in a run: started anew within rollout.max_restarts, and what happens beyond."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cli_run import CliRun

from lora_moe_rl.files.checkpoint import newest_valid
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DYING = Path(__file__).parent / "dying_engine.py"


def train(output: Path, *arguments: object) -> tuple[CliRun, int]:
    run = CliRun("train", *arguments, output=output)
    try:
        return run, run.finish()
    finally:
        run.end()


def test_a_receiver_killed_between_write_and_switch(tmp_path, monkeypatch):
    """vLLM's process of engine-0 dies in the refits after steps 2 and 4; one restart is allowed."""
    resolve_model("qwen3_moe")
    folder = tmp_path / "run"
    monkeypatch.setenv("MARKS", str(tmp_path))
    run, exit_code = train(
        tmp_path / "first.out",
        *(DYING, f"logging.run_dir={folder}", "trainer.steps=5", "checkpoint.every=2"),
        *("trainer.world_size=1", "trainer.ep=1", "rollout.engines=2", "rollout.max_restarts=1"),
    )
    print(run.output)
    records = list(read_jsonl(folder / "metrics.jsonl"))
    # The last was trained, and is kept, though its version is not served.
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record["adapter/version"] for record in records] == [0, 1, 2, 3]
    assert [record["rollout/restarts"] for record in records] == [0, 1, 1, 1]
    assert all(record["refit/max_diff"] <= 1e-4 for record in records[:3])
    assert "refit/max_diff" not in records[3]
    assert all(record["mismatch/max_abs_logprob_diff"] <= 1e-4 for record in records)
    assert "meanwhile engine-1 serves version 1: 2 logprobs" in run.output
    assert re.search(r"engine-0 died .*restart 1 of rollout.max_restarts=1", run.output)
    assert "engine-0 is back" in run.output

    assert exit_code == 75  # a fault: may go well another time
    assert "error: actor engine-0 failed: vLLM's processes of engine 0 have ended" in run.output
    assert "rollout.max_restarts=1 allows no more" in run.output and "--resume" in run.output
    assert run.leftovers() == []
    assert newest_valid(folder / "checkpoints").metadata["step"] == 4

    monkeypatch.delenv("MARKS")
    run, exit_code = train(tmp_path / "second.out", folder / "config.yaml", "--resume")
    assert exit_code == 0, run.output
    records = list(read_jsonl(folder / "metrics.jsonl"))
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["adapter/version"] for record in records] == [0, 1, 2, 3, 4]
    assert records[-1]["rollout/restarts"] == 0
    assert run.leftovers() == []


def test_a_receiver_stopped_between_write_and_switch(tmp_path, monkeypatch):
    """vLLM's process of engine-0 lives and does nothing in the refits after steps 2 and 4."""
    resolve_model("qwen3_moe")
    folder = tmp_path / "run"
    monkeypatch.setenv("MARKS", str(tmp_path))
    monkeypatch.setenv("FATE", "suspend")
    run, exit_code = train(
        tmp_path / "run.out",
        *(DYING, f"logging.run_dir={folder}", "trainer.steps=4", "refit.timeout_s=10"),
        *("trainer.world_size=1", "trainer.ep=1", "rollout.engines=2", "rollout.max_restarts=0"),
    )
    print(run.output)
    assert exit_code == 0 and run.leftovers() == []
    assert re.search(
        r"engine-0 is silent \(the workers of engine 0 gave no answer to refit_commit within "
        r"refit.timeout_s=10 s\): starting it anew, restart 1 of rollout.max_silences=2",
        " ".join(run.output.split()),
    )
    assert "meanwhile engine-1 serves version 1: 2 logprobs" in run.output
    records = list(read_jsonl(folder / "metrics.jsonl"))
    assert [record["adapter/version"] for record in records] == [0, 1, 2, 3]
    assert [record["rollout/restarts"] for record in records] == [0, 1, 1, 2]
    assert all(record["refit/max_diff"] <= 1e-4 for record in records)
