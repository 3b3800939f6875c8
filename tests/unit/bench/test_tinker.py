"""What is said of steps of a client and of a run, and when nothing is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_moe_rl.bench import tinker, tinker_loop
from lora_moe_rl.bench.report import all_met
from lora_moe_rl.bench.tinker_loop import GROUP, TOKENS, Loop, Taken
from lora_moe_rl.errors import BenchmarkError

RUN = {"rollout": 0.2, "reward": 0.01, "train": 0.1, "refit": 0.05, "step": 0.4}
LOOPS = [Loop(0.1, 0.3, 0.15, 0.56), Loop(0.1, 0.2, 0.1, 0.4), Loop(0.1, 0.4, 0.3, 0.8)]
GROWN = {"samples": [Taken(128, 0.5), Taken(512, 2.0)]}


def test_a_step_is_the_median_of_a_clients_beside_a_runs():
    found = tinker.figures(RUN, LOOPS, GROWN)
    assert found["seconds"] == {"sample": 0.3, "learn": 0.15, "publish": 0.1, "step": 0.56}
    assert found["of_the_run"] == {"sample": 0.2, "learn": 0.1, "publish": 0.05, "step": 0.4}
    assert found["ratio"] == pytest.approx(1.4) and all_met(found)
    assert not all_met(tinker.figures(RUN | {"step": 0.3}, LOOPS, GROWN))
    slower = {"samples": [Taken(128, 0.5), Taken(512, 4.0)]}
    assert not all_met(tinker.figures(RUN, LOOPS, slower))


def test_steps_whose_tokens_are_not_of_one_policy_are_no_figures():
    right = {"replay_coverage:mean": 1.0, "sampled_logprob_diff:max": 1e-5}
    tinker_loop.check(right)
    for wrong in (0.99, float("nan")):
        with pytest.raises(BenchmarkError, match=f"replay coverage {wrong}"):
            tinker_loop.check(right | {"replay_coverage:mean": wrong})
    for wrong in (2e-4, float("nan")):
        with pytest.raises(BenchmarkError, match=f"differ by {wrong}"):
            tinker_loop.check(right | {"sampled_logprob_diff:max": wrong})


def test_growth_is_of_medians_of_warm_calls_in_both_orders():
    asked, slow = [], [30.0, 60.0, 90.0, 1.0, 2.0, 3.0, 9.0, 2.0, 8.0, 1.0, 2.0, 3.0]

    def call(size):
        asked.append(size)
        return Taken(size * 8, slow[len(asked) - 1])

    found = tinker_loop.grown(call, (16, 64, 256))
    assert asked == [16, 64, 256] * 2 + [256, 64, 16] + [16, 64, 256]
    assert found == [Taken(128, 1.0), Taken(512, 2.0), Taken(2048, 3.0)]


def test_samples_that_ended_early_are_no_figures():
    pytest.importorskip("tinker")

    def sampler(lengths):
        group = SimpleNamespace(sequences=[SimpleNamespace(tokens=[3] * n) for n in lengths])
        future = SimpleNamespace(result=lambda: group)
        return SimpleNamespace(sample=lambda prompt, count, how: future)

    assert len(tinker_loop.groups_of(sampler([TOKENS] * GROUP), [[1, 2]])) == 1
    with pytest.raises(BenchmarkError, match=f"samples of \\[{TOKENS - 1}, {TOKENS}\\] tokens"):
        tinker_loop.groups_of(sampler([TOKENS, TOKENS - 1]), [[1, 2]])


def test_a_service_that_does_not_start_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        pytest.raises(BenchmarkError, match="the service ended with exit code 1 before"),
        tinker.served(Path("recipe.yaml"), tmp_path),
    ):
        pass
