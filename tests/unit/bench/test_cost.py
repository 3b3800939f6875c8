"""Algorithms in turns: which work each is given, and what is said of their seconds."""

from __future__ import annotations

import pytest

from lora_moe_rl import cli
from lora_moe_rl.bench import cost, model
from lora_moe_rl.bench import step as bench_step
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.errors import BenchmarkError

SECONDS = {"grpo": (1.0, 2.0, 4.0), "dapo": (1.02, 2.2, 4.0), "ppo": (2.0, 5.0, 8.0)}


@pytest.fixture
def asked(monkeypatch):
    """Stands for the runs: `[(directory, recipe)]` of all, in their order."""
    calls = []

    def run(name, folder, recipe, steps, settings):
        calls.append((folder.name, load_config(str(recipe))))
        algorithm, number = name.rsplit("-", 1)
        seconds = SECONDS[algorithm][int(number)]
        # The steps to warm up are slow.
        return [
            {"step": n, "time/step": seconds * (9 if n <= bench_step.WARMUP else 1)}
            | {"time/train": seconds / 2}
            for n in range(1, steps + 1)
        ]

    monkeypatch.setattr(cost, "run", run)
    monkeypatch.setattr(cost, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(model, "make_model", lambda folder: folder.mkdir())
    monkeypatch.setattr(bench_step, "gate", lambda records, steps: [])
    return calls


def measured(*arguments) -> int:
    return cli.main(["bench", "cost", "--rounds", "3", "--steps", "4", *arguments])


def test_algorithms_take_turns_and_are_compared_within_a_round(asked, capsys):
    assert measured("--algorithms", "grpo,dapo,ppo") == 0
    assert [name for name, _ in asked[:4]] == ["grpo-0", "dapo-0", "ppo-0", "grpo-1"]
    out = capsys.readouterr().out
    assert "dapo: a step over one of grpo: 1.02, at most 1.05: met" in out
    # 2, 2.5 and 2: not the median of 2, 5 and 8 over that of 1, 2 and 4.
    assert "ppo: a step over one of grpo: 2, at most 2.2: met" in out


def test_work_is_the_same_for_all(asked):
    measured("--algorithms", "grpo,dapo,ppo")
    configs = {name: config.algorithm for name, config in asked}
    assert [configs[f"{name}-0"].name for name in SECONDS] == ["grpo", "dapo", "ppo"]
    assert all(one.draw_again == 0 for one in configs.values())
    assert configs["ppo-0"].critic_warmup == 0
    assert {(one.prompts_per_step, one.group_size) for one in configs.values()} == {(16, 8)}


def test_a_run_that_was_not_right_has_no_seconds(asked, monkeypatch):
    monkeypatch.setattr(bench_step, "gate", lambda records, steps: ["step 3: no routes"])
    with pytest.raises(BenchmarkError, match="grpo-0: no seconds to report: step 3: no routes"):
        cost.main(["--rounds", "1"])
