"""A whole run with an environment of TRL's kind, with real engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_run import CliRun

from lora_moe_rl.files.jsonl import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SAMPLES = 16


def test_a_run_with_an_environment_of_trl_gets_its_rewards_and_leaves_no_process(tmp_path):
    folder, recipe = tmp_path / "run", Path(__file__).with_name("trl_recipe.py")
    settings = f"logging.samples_per_step={SAMPLES}", f"logging.run_dir={folder}"
    run = CliRun("train", recipe, *settings, output=tmp_path / "out")
    try:
        assert run.finish(800) == 0, run.output
        assert not run.leftovers()  # the environments' processes among them
    finally:
        run.end()
    for step, record in enumerate(read_jsonl(folder / "metrics.jsonl"), start=1):
        assert record["mismatch/kl"] <= 1e-6 and record["replay/coverage"] == 1
        assert record["environment/conversations"] == SAMPLES and record["reward/failed"] == 0
        assert record["environment/tool_calls"] > 0 and record["environment/retried"] == 0
        assert record["reward/SevenMore"] == pytest.approx(record["reward/mean"])
        samples = [one for one in read_jsonl(folder / "samples.jsonl") if one["step"] == step]
        assert {one["reward"] for one in samples} <= {0, 0.5, 1}
