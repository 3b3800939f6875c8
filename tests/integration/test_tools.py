"""A whole run with tools, with real engines: three turns a conversation, all routes replayed."""

from __future__ import annotations

import numpy as np
import pytest
from cli_run import ROOT, CliRun

from lora_moe_rl.files.jsonl import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SAMPLES, STEPS = 128, 45


def test_a_run_with_tools_is_one_policy_with_every_route_replayed_and_only_its_own_tokens(tmp_path):
    folder = tmp_path / "run"
    settings = (f"trainer.steps={STEPS}", "replay.audit=1", f"logging.samples_per_step={SAMPLES}")
    recipe = ROOT / "recipes/tiny_tools.py"
    run = CliRun("train", recipe, *settings, f"logging.run_dir={folder}", output=tmp_path / "out")
    try:
        assert run.finish(1100) == 0, run.output
        assert not run.leftovers()  # the tools' processes among them
    finally:
        run.end()
    records = list(read_jsonl(folder / "metrics.jsonl"))
    assert [record["environment/conversations"] for record in records] == [SAMPLES] * STEPS
    rewards = [record["reward/mean"] for record in records]
    assert np.mean(rewards[:5]) < 0.4 and np.mean(rewards[-5:]) > 0.7
    for record in records:
        assert record["mismatch/kl"] <= 1e-6 and record["replay/coverage"] == 1
        assert record["replay/disagreement"] == 0 and record["replay/audited"] > 0
        assert SAMPLES < record["environment/turns"] <= 3 * SAMPLES
        assert record["environment/tool_calls"] > 0 and record["environment/forks"] == 0
    for step, record in enumerate(records, start=1):
        samples = [one for one in read_jsonl(folder / "samples.jsonl") if one["step"] == step]
        segments = [part for one in samples for part in one.get("segments", [])]
        several = sum(p["tokens"] for p in segments if p["author"] == "policy")
        single = sum(one["tokens"] for one in samples if "segments" not in one)
        assert record["loss/tokens"] == record["rollout/tokens"] == several + single
        assert any(part["author"] == "tool" for part in segments)
