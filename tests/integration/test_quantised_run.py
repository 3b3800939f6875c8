"""Whole runs on an INT4 base, with real engines that hold it as the trainer does."""

from __future__ import annotations

import pytest
from cli_run import RECIPE, CliRun

from lora_moe_rl.files.run_dir import read_jsonl

pytestmark = pytest.mark.timeout(900)


def finish(folder, *arguments):
    run = CliRun(
        "train", *arguments, f"logging.run_dir={folder}", output=folder.with_suffix(".out")
    )
    try:
        assert run.finish() == 0, run.output
    finally:
        run.end()
    return list(read_jsonl(folder / "metrics.jsonl"))


@pytest.mark.parametrize("model", ["qwen3_moe-int4", "deepseek_v3-int4"])
def test_trainer_and_engine_compute_the_same(model, tmp_path):
    settings = (RECIPE, f"model={model}", "checkpoint.every=1", "logging.tokens=true")
    records = finish(tmp_path / "run", *settings, "trainer.steps=2")
    assert [r["step"] for r in records] == [1, 2]
    for record in records:
        assert record["mismatch/kl"] <= 1e-6 and record["mismatch/max_abs_logprob_diff"] <= 1e-4
        assert record["replay/coverage"] == 1 and record["refit/max_diff"] <= 1e-4
        assert record["optim/grad_norm"] > 0
    held = records[-1]
    # Resumed, the run goes on as one that never stopped.
    resumed = finish(tmp_path / "run", *settings, "trainer.steps=3", "checkpoint.resume=true")
    assert [r["step"] for r in resumed] == [1, 2, 3] and resumed[1] == held
