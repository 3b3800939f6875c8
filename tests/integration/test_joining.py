"""Engines that leave a run and join it, with real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_run import CliRun

from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DYING = Path(__file__).parent / "dying_engine.py"
INTERRUPTED = 130


def test_an_engine_joins_one_leaves_and_joins_again_and_no_prompt_is_lost(tmp_path, monkeypatch):
    """engine-1 starts while the run goes on. Once it has joined, engine-0 loses vLLM's process in a
    refit, and no restart is allowed."""
    resolve_model("qwen3_moe")
    folder = tmp_path / "run"
    monkeypatch.setenv("MARKS", str(tmp_path))
    monkeypatch.setenv("AFTER_A_JOIN", "1")
    run = CliRun(
        "train",
        *(DYING, f"logging.run_dir={folder}", "trainer.steps=1000", "checkpoint.every=0"),
        *("trainer.world_size=1", "trainer.ep=1", "rollout.engines=2", "rollout.least_engines=1"),
        "rollout.max_restarts=0",
        output=tmp_path / "run.out",
    )
    try:
        run.wait_for_text("engine-1 joins")
        run.wait_for_text("engine-0 has left")
        run.wait_for_text("engine-0 joins")
        run.wait_for(lambda: _engines(folder)[-1] == 2, "a step with both")
        run.interrupt()
        assert run.finish() == INTERRUPTED, run.output
    finally:
        run.end()
    there = _engines(folder)
    assert there[0] == 1 and 1 in there[there.index(2) :] and there[-1] == 2
    records = list(read_jsonl(folder / "metrics.jsonl"))
    assert all(record["refit/max_diff"] <= 1e-4 for record in records)
    assert all(record["mismatch/max_abs_logprob_diff"] <= 1e-4 for record in records)
    order = list(read_jsonl(folder / "order.jsonl"))
    assert [one["step"] for one in order] == list(range(1, len(records) + 1))
    rows = [group["drawn"] for one in order for group in one["groups"]]
    assert sorted(rows) == list(range(16 * len(records)))
    assert run.leftovers() == []


def _engines(folder: Path) -> list[float]:
    return [record["rollout/engines"] for record in read_jsonl(folder / "metrics.jsonl")]
