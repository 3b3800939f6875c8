"""ReMax with real engines: the greedy sample is Hugging Face's, it is a baseline and nothing else,
and a run that goes on has the same ones."""

from __future__ import annotations

import shutil
from collections import defaultdict

import pytest
import torch
from cli_run import RECIPE
from hf import load
from test_run import run_to_end
from test_trl import started

from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.tiny.tokenizer import make_tokenizer, token_id

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SETTINGS = (
    "algorithm.advantage=remax",
    *("trainer.steps=2", "checkpoint.every=1"),
    *("algorithm.prompts_per_step=16", "algorithm.group_size=2", "logging.samples_per_step=32"),
)


def greedy_text(model, tokenizer, prompt: str) -> str:
    ids = torch.tensor([tokenizer.encode(prompt)])
    with torch.no_grad():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                               max_new_tokens=16, eos_token_id=token_id("<eos>"),
                               pad_token_id=token_id("<pad>"))  # fmt: skip
    return tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


def baselines(samples) -> dict[tuple[int, int], float]:
    """Of each group; every sample's advantage is its reward less that."""
    found = defaultdict(set)
    for one in samples:
        assert one["advantage"] == one["reward"] - one["baseline"]
        found[one["step"], one["drawn"]].add(one["baseline"])
    assert all(len(values) == 1 for values in found.values())
    return {key: values.pop() for key, values in found.items()}


def test_the_baseline_is_the_reward_of_hugging_faces_greedy_answer_also_in_a_run_that_goes_on(
    tmp_path,
):
    """In the first step the adapter is fresh, and the policy is the base."""
    whole = run_to_end(tmp_path / "whole", RECIPE, *SETTINGS)
    samples = [*read_jsonl(whole.folder / "samples.jsonl")]
    found = baselines(samples)
    assert len(samples) == 64 and len(found) == 32
    model, tokenizer = load(resolve_model("qwen3_moe")), make_tokenizer()
    rewards = []
    for one in samples[:32]:
        left, sign, right = (
            one["prompt"].rstrip("=").partition("+" if "+" in one["prompt"] else "-")
        )
        answer = int(left) + (int(right) if sign == "+" else -int(right))
        rewards.append(float(greedy_text(model, tokenizer, one["prompt"]) == str(answer)))
        assert one["step"] == 1 and one["baseline"] == rewards[-1]
    assert 0 < sum(rewards) < len(rewards)
    for record, step in zip(read_jsonl(whole.folder / "metrics.jsonl"), (1, 2), strict=True):
        own = [value for (at, _), value in found.items() if at == step]
        assert record["reward/baseline"] == pytest.approx(sum(own) / len(own))
        assert record["mismatch/kl"] <= 1e-6 and record["replay/coverage"] == 1
    stopped = tmp_path / "stopped"
    shutil.copytree(whole.folder, stopped)
    shutil.rmtree(stopped / "checkpoints/step-000002")
    resumed = run_to_end(stopped, stopped / "config.yaml", "--resume")
    assert "going on from" in resumed.output and resumed.samples == samples
    assert not whole.leftovers and not resumed.leftovers


def test_in_an_environment_of_several_turns_a_whole_conversation_is_the_baseline(tmp_path):
    folder = started(tmp_path, "algorithm.advantage=remax")
    samples = [*read_jsonl(folder / "samples.jsonl")]
    assert {*baselines(samples).values()} <= {0, 0.5, 1} and len(samples) == 32
    for record in read_jsonl(folder / "metrics.jsonl"):
        assert record["environment/conversations"] == 16 and record["reward/failed"] == 0
        assert record["mismatch/kl"] <= 1e-6 and record["replay/coverage"] == 1
