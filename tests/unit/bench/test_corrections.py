"""Corrections beside each other: which runs are asked for, and what is said of them."""

from __future__ import annotations

import json

import pytest
import torch

from lora_moe_rl import cli
from lora_moe_rl.bench import corrections as bench
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.plugins import PARTS

AGED = {"mismatch/kl_age_0": None, "mismatch/kl_age_1": 1e-3, "mismatch/kl_age_2": 0.0}


@pytest.fixture
def asked(monkeypatch):
    """Stands for the runs: what each was asked, by its folder."""
    found = {}

    def run(name, folder, recipe, steps, settings):
        found[folder.name] = settings
        values = dict(word.split("=", 1) for word in settings)
        end = 0.7 if "schedule.lag" not in values else 0.66 if "tis" in name else 0.6
        ages = AGED if "schedule.lag" in values else {"mismatch/kl": 2e-12}
        end += 0.01 * int(values["seed"])
        rewards = [0.2] * 5 + [end] * (steps - 5)
        return [
            {"step": n, "reward/mean": reward, "rollout/age_mean": 1.5, **ages}
            for n, reward in enumerate(rewards, start=1)
        ]

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench, "busy_cores", lambda: 0.0)
    return found


def run_bench(tmp_path, *words):
    return cli.main(["bench", "corrections", "--out", str(tmp_path), "--json", *words])


def test_corrections_are_held_against_the_synchronous_run_with_the_same_routes(
    asked, tmp_path, capsys
):
    cases = "synchronous,uncorrected,tis,icepop"
    assert run_bench(tmp_path, "--seeds", "1,3", "--cases", cases, "--steps", "12") == 1
    result = json.loads(capsys.readouterr().out)
    assert len(asked) == 4 * 2 * 2
    row = result["cases"]["tis, replay off"]
    assert row["first"] == pytest.approx(0.2) and row["last"] == pytest.approx(0.68)
    assert row["spread"] == pytest.approx(0.02) and row["age"] == pytest.approx(1.5)
    assert result["cases"]["synchronous, replay r3"]["kl"] == {"0": pytest.approx(2e-12)}
    assert row["kl"]["1"] == pytest.approx(1e-3) and row["kl"]["2"] == 0
    met = {name: goal["met"] for name, goal in result["goals"].items()}
    assert met == {
        f"{case}, replay {replay}: reward lost to synchronous": case == "tis"
        for case in ("tis", "icepop")
        for replay in ("r3", "off")
    }
    assert (tmp_path / "rewards.png").stat().st_size > 10_000


@pytest.mark.parametrize("case", bench.CASES)
def test_every_case_is_a_run_that_may_start(case):
    words = bench.settings(case, "r3", lag=3)
    config = override(RunConfig(), words)
    assert config.schedule.lag == (0 if case == "synchronous" else 3)
    assert config.replay.mode == "r3"


def test_without_a_correction_tokens_weigh_one_and_metrics_say_what_they_should_have_weighed():
    name = bench.CASES["uncorrected"][0].partition("=")[2]
    correction = PARTS["correction"].find(name)
    part = correction(correction.Settings())
    weights, metrics = part.weights(torch.tensor([0.0, 0.5, -3.0]), None)
    assert weights.tolist() == [1.0, 1.0, 1.0]
    assert metrics["weight_largest"].tolist() == pytest.approx([1.0, 1.6487212, 0.0497871])


def test_a_case_that_is_not_there_is_refused_before_anything_runs(asked, tmp_path, capsys):
    assert run_bench(tmp_path, "--cases", "tiss") == 2
    assert "tiss" in capsys.readouterr().err and not asked
