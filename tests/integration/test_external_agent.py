"""A run whose agent is a program with the openai client: real engines, every route replayed."""

from __future__ import annotations

import pytest
from cli_run import ROOT, CliRun

from lora_moe_rl.files.run_dir import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SAMPLES = 128


def test_an_agent_with_the_openai_client_is_trained_token_for_token_and_leaves_no_process(tmp_path):
    folder = tmp_path / "run"
    settings = ("trainer.steps=2", "replay.audit=1", f"logging.samples_per_step={SAMPLES}")
    recipe = ROOT / "recipes/tiny_agent.py"
    run = CliRun("train", recipe, *settings, f"logging.run_dir={folder}", output=tmp_path / "out")
    try:
        assert run.finish(1100) == 0, run.output
        assert not run.leftovers()  # the agents among them
    finally:
        run.end()
    records = list(read_jsonl(folder / "metrics.jsonl"))
    assert [record["environment/conversations"] for record in records] == [SAMPLES] * 2
    for record in records:
        assert record["mismatch/kl"] <= 1e-6 and record["replay/coverage"] == 1
        assert record["replay/disagreement"] == 0 and record["replay/audited"] > 0
        assert record["environment/done"] == SAMPLES and record["environment/forks"] == 0
        assert SAMPLES < record["environment/turns"] <= 2 * SAMPLES
        assert 0 < record["reward/mean"] < 1 and record["reward/failed"] == 0
    samples = list(read_jsonl(folder / "samples.jsonl"))
    several = [one["segments"] for one in samples if "segments" in one]
    assert several and all(
        [part["author"] for part in one] == ["policy", "user", "policy"] for one in several
    )
