"""Self-distillation with real engines: what a run records of its teacher is what transformers alone
gives the sampled tokens behind the other prompt, under the adapter of that step; and a policy that
can read a solution learns from it."""

from __future__ import annotations

from collections import defaultdict

import hf
import numpy as np
import pytest
import torch
from cli_run import RECIPE
from solution_reader import save_reader
from test_run import check_records, run_to_end
from transformers import AutoModelForCausalLM

from lora_moe_rl.export import command as export
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.tiny.tokenizer import make_tokenizer

pytestmark = [pytest.mark.timeout(900)]

TEMPLATES = (
    "algorithm.solution_template={successful_previous_attempt};",
    "algorithm.reprompt_template={solution}{feedback}{prompt}",
)
SETTINGS = (
    *("algorithm=sdpo", "algorithm.prompts_per_step=8", "algorithm.group_size=4"),
    *("algorithm.feedback_key=answer", "algorithm.feedback_template=<{feedback_raw}>"),
    *TEMPLATES,
    *("trainer.steps=2", "trainer.warmup_steps=0", "checkpoint.every=1"),
    *("logging.samples_per_step=32", "logging.tokens=true"),
)
SIX_FIGURES = 1e-5  # of the records, relative


def right_answer(prompt: str) -> str:
    return str(eval(prompt.rstrip("=")))


def other_prompts(samples: list[dict]) -> list[str]:
    """What the teacher has to read of each: the first other success of the group, and the answer
    of the row, which is the feedback here."""
    groups = defaultdict(list)
    for one in samples:
        groups[one["drawn"]].append(one)
    found = []
    for one in samples:
        others = [other for other in groups[one["drawn"]] if other is not one]
        shown = next((o["response"] for o in others if o["reward"] == 1 and o["response"]), None)
        solution = "" if shown is None else f"{shown};"
        assert one["teacher_read"].startswith("solution ") == (shown is not None)
        assert one["teacher_read"].endswith("feedback")
        found.append(f"{solution}<{right_answer(one['prompt'])}>{one['prompt']}")
    return found


def test_the_teachers_logprobs_are_those_of_transformers_under_the_adapter_of_the_step(tmp_path):
    run = run_to_end(tmp_path / "run", RECIPE, *SETTINGS)
    records = [*read_jsonl(run.folder / "metrics.jsonl")]
    check_records(records, 2)
    merged = tmp_path / "merged"
    done = run.folder / "checkpoints/step-000001"
    words = [str(done), "--to", "merged", "--dtype", "float32", "--out", str(merged)]
    assert export.main(words) == 0
    samples = [*read_jsonl(run.folder / "samples.jsonl")]
    tokens = [*read_jsonl(run.folder / "tokens.jsonl")]
    encode = make_tokenizer().encode
    for record, base in zip(records, (resolve_model("qwen3_moe"), merged), strict=True):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        own = [one for one in samples if one["step"] == record["step"]]
        of_tokens = [one for one in tokens if one["step"] == record["step"]]
        assert len(own) == len(of_tokens) == 32
        differences, by_hand = [], []
        for prompt, one in zip(other_prompts(own), of_tokens, strict=True):
            every = hf.logprobs(model, [*encode(prompt), *one["ids"]])
            wanted = every[-len(one["ids"]) :]
            sampled = np.array(one["logprobs"])
            differences.append(np.abs(wanted - sampled - one["advantages"]).max())
            by_hand.append(sampled - wanted)
        assert max(differences) < SIX_FIGURES * 20  # a logprob may be as low as -20
        mean = np.concatenate(by_hand).mean()
        assert record["teacher/reverse_kl"] == pytest.approx(mean, rel=SIX_FIGURES)
        assert record["teacher/taught"] == 1 and record["teacher/too_long"] == 0
    assert np.abs(by_hand[0]).max() > 0.1
    assert not run.leftovers


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """The tiny model, once it reads a solution that stands before a problem."""
    folder = tmp_path_factory.mktemp("reader")
    save_reader(folder)
    return folder


ANSWERS = (
    *("algorithm.success_reward=null", "algorithm.feedback_key=answer"),
    *("algorithm.feedback_template={feedback_raw};", TEMPLATES[1]),
)
LAG = ("schedule.lag=1", "refit.slots=3")
DISTILL = ("algorithm.loss=distill", "algorithm.teacher_weights=base")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "least"),
    [
        (TEMPLATES, 0.2),
        ((*TEMPLATES, "algorithm.teacher_weights=base"), 0.3),
        ((*TEMPLATES, "algorithm.teacher_weights=base", *LAG), 0.3),
        ((*TEMPLATES, "trainer.lr=5e-4", *LAG), 0.2),
        (ANSWERS, 0.3),
        ((*TEMPLATES, *DISTILL), 0.2),
    ],
    ids=[
        *("solutions", "base reads", "base reads, lag 1", "lag 1, slower", "answers of the rows"),
        "likeliest tokens",
    ],
)
def test_a_policy_that_can_read_learns_from_what_it_is_shown(reader, tmp_path, settings, least):
    asked = (f"model={reader}", "algorithm=sdpo", *settings)
    run = run_to_end(tmp_path / "run", RECIPE, *asked)
    records = [*read_jsonl(run.folder / "metrics.jsonl")]
    first, last = (
        np.mean([one["reward/mean"] for one in part]) for part in (records[:5], records[-5:])
    )
    print(f"reward {first:.3f} -> {last:.3f}")
    assert len(records) == 40 and last - first > least
    assert not run.leftovers
