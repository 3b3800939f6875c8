"""Runs that are checked: right but for what a test changes."""

import json

import pytest
import torch

from lora_moe_rl import cli
from lora_moe_rl.tiny import shapes
from lora_moe_rl.tiny.tokenizer import make_tokenizer

REWARDS = """
import time

def right(completions, answer, **_): return [float(c == a) for c, a in zip(completions, answer)]
def same(completions, **_): return [0.5] * len(completions)
def slow(completions, **_): time.sleep(60)
def none(completions, **_): return [None] * len(completions)
def half(completions, **_): return [1.0, None, float("nan")]
def pairs(completions, **_): return [[1.0, 2.0]] * len(completions)
def group(completions, **_): return [1.0]
def needs(completions, level): return [1.0] * len(completions)
def verls(solution_str, ground_truth, data_source, extra_info):
    return float(solution_str == ground_truth)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Qwen3-MoE directory with 8 experts and 512 positions."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shapes.build_model("qwen3_moe").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def check(model, tmp_path, monkeypatch, capsys):
    """Checks a run that is right but for `settings`: its exit code, and {step: (state, text)}."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)

    def check(*settings):
        right = [f"model={model}", "data.path=rows.jsonl", "reward.function=rewards.py:right"]
        right.append("algorithm.prompts_per_step=1")
        code = cli.main(["check", *right, "data.order=sequential", *settings])
        output = capsys.readouterr().out
        lines = output.partition("\n\n")[0].splitlines()
        found = {line[8:16].strip(): (line[:8].strip(), line[16:]) for line in lines}
        return code, found, output.partition("\n\n")[2]

    return check
