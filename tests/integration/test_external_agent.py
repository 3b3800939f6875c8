"""A run whose agent is a program with the openai client: real engines, every route replayed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from cli_run import ROOT, CliRun
from safetensors.numpy import load_file

from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.tiny.tokenizer import make_tokenizer
from lora_moe_rl.verify import hf

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


STEPS, PROMPTS, GROUP = 3, 4, 4
ASKING = ROOT / "tests/helpers/asking_agent.py"


def asked_by(folder: Path, monkeypatch, answers: Path | None) -> list[dict]:
    """The steps of a run whose agent notes in `answers` what other models say."""
    if answers is None:
        monkeypatch.delenv("ANSWERS", raising=False)
    else:
        monkeypatch.setenv("ANSWERS", str(answers))
    settings = (
        f"environment.command={sys.executable} {ASKING}", f"trainer.steps={STEPS}",
        f"algorithm.prompts_per_step={PROMPTS}", f"algorithm.group_size={GROUP}",
        f"logging.samples_per_step={PROMPTS * GROUP}", "replay.audit=1",
    )  # fmt: skip
    recipe = ROOT / "recipes/tiny_agent.py"
    output = folder.with_suffix(".out")
    run = CliRun("train", recipe, *settings, f"logging.run_dir={folder}", output=output)
    try:
        assert run.finish(900) == 0, run.output
        assert not run.leftovers()
    finally:
        run.end()
    return list(read_jsonl(folder / "metrics.jsonl"))


def test_the_base_and_older_versions_answer_beside_the_policy_and_are_not_trained(
    tmp_path, monkeypatch
):
    """What they say is what the base says by itself; and the run is to the bit that of an agent
    which never asks them."""
    notes = tmp_path / "answers.jsonl"
    records = asked_by(tmp_path / "run", monkeypatch, notes)
    lines = list(read_jsonl(notes))
    base = [line for line in lines if line["model"] == "base"]
    versions = [line for line in lines if "@" in line["model"] and "tokens" in line]
    gone = [line for line in lines if "instead" in line]
    tries = STEPS * PROMPTS * GROUP
    assert len(base) == 2 * tries and {line["model"] for line in versions} == {
        "policy@0", "policy@1", "policy@2"
    }  # fmt: skip
    assert gone and all(line["instead"] == [1, 2] for line in gone)
    refused = tries + len(gone)
    total = sum(record["environment/base_requests"] for record in records)
    assert total == len(base) + len(versions) + refused

    model, tokenizer = hf.load(resolve_model("qwen3_moe")), make_tokenizer()

    def apart(line: dict) -> float:
        return np.abs(line["logprobs"] - by_itself(model, tokenizer, line)).max()

    # Of one odd prompt rounding moves the answer by 5e-5: 1e-7 of its embeddings does by 3e-5.
    far = [apart(line) for line in base]
    assert np.quantile(far, 0.9) < 1e-5 and max(far) < 2e-4
    assert max(apart(line) for line in versions if line["model"] == "policy@2") > 1e-3

    alone = asked_by(tmp_path / "alone", monkeypatch, None)
    assert {record["environment/base_requests"] for record in alone} == {0}
    for name in ("samples.jsonl", "order.jsonl"):
        same = (tmp_path / "alone" / name).read_text()
        assert (tmp_path / "run" / name).read_text() == same
    ours, theirs = (
        load_file(tmp_path / name / "adapter/adapter_model.safetensors")
        for name in ("run", "alone")
    )
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(values, theirs[name], err_msg=name)


def by_itself(model, tokenizer, line: dict) -> np.ndarray:
    """What the model itself gives an answer's tokens."""
    prompt = []
    for part in line["parts"]:
        text = isinstance(part, str)
        prompt += tokenizer.encode(part, add_special_tokens=False) if text else part
    return hf.logprobs(model, [*prompt, *line["tokens"]])[len(prompt) - 1 :]
