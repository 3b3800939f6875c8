"""Algorithms in turns: which work each is given, and what is said of their seconds."""

from __future__ import annotations

import pytest

from lora_moe_rl import cli
from lora_moe_rl.bench import cost, model
from lora_moe_rl.bench import step as bench_step
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.errors import BenchmarkError

SECONDS = {"grpo": (1.0, 2.0, 4.0), "dapo": (1.04, 2.2, 4.0), "ppo": (2.0, 5.0, 8.0)}


@pytest.fixture
def asked(monkeypatch):
    """Stands for the run, whose stages beside the update take a second, and for the updates:
    `[config]` of all."""
    calls = []

    def run(name, folder, recipe, steps, settings):
        calls.append(load_config(str(recipe)))
        # The steps to warm up are slow.
        slow = [9.0 if n <= bench_step.WARMUP else 1.0 for n in range(1, steps + 1)]
        return [{"time/step": 0.5 + one, "time/train": 0.5} for one in slow]

    def updates(configs, folder, turns):
        calls.extend(configs.values())
        assert turns == 3
        return [{name: SECONDS[name][turn] for name in configs} for turn in range(turns)]

    monkeypatch.setattr(bench_step, "run_recipe", run)
    monkeypatch.setattr(cost, "_updates", updates)
    monkeypatch.setattr(cost, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(model, "make_model", lambda folder: folder.mkdir())
    monkeypatch.setattr(bench_step, "gate", lambda records, steps, work: [])
    return calls


def measured(*arguments) -> int:
    return cli.main(["bench", "cost", "--turns", "3", "--steps", "4", *arguments])


def test_a_whole_step_is_an_update_beside_stages_that_are_the_same(asked, capsys):
    assert measured("--algorithms", "grpo,dapo,ppo") == 0
    out = capsys.readouterr().out
    assert "the other stages of a step take 1.000 s" in out
    # By turn 2.04/2, 3.2/3 and 5/5; 3/2, 6/3 and 9/5.
    assert "dapo: a step over one of grpo: 1.02, at most 1.05: met" in out
    assert "ppo: a step over one of grpo: 1.8, at most 2.2: met" in out


def test_work_is_the_same_for_all(asked):
    measured("--algorithms", "grpo,dapo,ppo")
    made = [config.algorithm for config in asked]
    assert [one.name for one in made] == ["grpo", "grpo", "dapo", "ppo"]
    assert all(one.draw_again == 0 for one in made) and made[-1].critic_warmup == 0
    assert {(one.prompts_per_step, one.group_size) for one in made} == {(16, 8)}


def test_a_run_that_was_not_right_has_no_seconds(asked, monkeypatch):
    monkeypatch.setattr(bench_step, "gate", lambda records, steps, work: ["step 3: no routes"])
    with pytest.raises(BenchmarkError, match="no seconds to report: step 3: no routes"):
        cost.main([])


@pytest.mark.slow
def test_every_algorithm_makes_its_updates_in_turns_on_one_rank(tmp_path):
    """Real updates of the bench's own model; each algorithm has trained once a turn."""
    model.make_model(tmp_path / "model")
    configs = {name: cost._config(tmp_path, name, 2) for name in ("grpo", "gspo", "ppo")}
    found = cost._updates(configs, tmp_path / "model", 2)
    assert len(found) == 2 and all(list(turn) == list(configs) for turn in found)
    assert all(min(turn.values()) > 0 for turn in found)
