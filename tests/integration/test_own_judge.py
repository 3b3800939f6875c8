"""A whole run whose judge is the frozen base on the run's own engines: it judges, and changes none
of the policy's samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_run import RECIPE, CliRun

from lora_moe_rl.files.jsonl import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
STEPS = 2
# The tiny base says digits to whatever it is asked; which ones is a judgement too.
JUDGE = {
    "function": "lora_moe_rl.rewards:Judge",
    "weight": 0,
    "args.url": "engines",
    "args.model": "base",
    "args.template": "{completion}+1=",
    "args.score": r"(\d)",
    "args.highest": 9,
    "args.options": '{"max_tokens": 4}',
}


def train(folder: Path, *arguments: object) -> list[list[dict]]:
    """The records of all samples, and of all steps."""
    # What is said and nothing around it, to policy and judge: the tiny base says nothing to more.
    same = ["data.chat_template=true", "model.chat_template={{ messages[0].content }}"]
    same += ["reward.function=null", f"reward.functions.right={RECIPE}:reward"]
    same += ["logging.samples_per_step=128", f"trainer.steps={STEPS}", f"logging.run_dir={folder}"]
    run = CliRun("train", RECIPE, *same, *arguments, output=folder.with_suffix(".out"))
    try:
        assert run.finish(1100) == 0, run.output
    finally:
        run.end()
    return [list(read_jsonl(folder / f"{name}.jsonl")) for name in ("samples", "metrics")]


def test_the_base_judges_and_changes_no_sample(tmp_path):
    settings = [f"reward.functions.judge.{key}={value}" for key, value in JUDGE.items()]
    judged, metrics = train(tmp_path / "judged", *settings)
    plain, _ = train(tmp_path / "plain")
    said = [sample["extra"]["judge/judgement"] for sample in judged if "extra" in sample]
    given = [sample["rewards"]["judge"] for sample in judged]
    assert len(given) == STEPS * 128 and len(set(said)) > 10
    numbers = [one for one in given if one is not None]
    assert len(numbers) > 0.5 * len(given) and len(set(numbers)) > 3
    for record in metrics:
        assert record["reward/judge/failed"] < 64 and record["mismatch/kl"] < 1e-6
    assert [one["response"] for one in judged] == [one["response"] for one in plain]
