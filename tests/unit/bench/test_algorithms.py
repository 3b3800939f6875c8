"""Algorithms beside each other: what is read of their runs, and what is said of it."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from lora_moe_rl import cli
from lora_moe_rl.bench import algorithms as bench
from lora_moe_rl.errors import BenchmarkError


def records(steps, gain):
    return [
        {"step": n, "reward/mean": 0.2 + gain * (n > steps // 2), "time/step": 1.0 + n % 2}
        for n in range(1, steps + 1)
    ]


def train(monkeypatch, gains, exit_code=0):
    """Stands for `lora-moe-rl train`, which writes metrics.jsonl. Returns the commands."""
    commands = []

    def run(command, stdout):
        commands.append(command)
        values = dict(word.split("=", 1) for word in command if "=" in word)
        folder = bench.Path(values["logging.run_dir"])
        folder.mkdir()
        steps = int(values["trainer.steps"])
        lines = records(steps - bool(exit_code), gains[values["algorithm.name"]])
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        return SimpleNamespace(returncode=exit_code)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(bench, "busy_cores", lambda: 0.0)
    return commands


def bench_of(tmp_path, *words):
    out = ["--out", str(tmp_path / "out"), "--steps", "12", "--json"]
    return cli.main(["bench", "algorithms", *out, *words])


def test_each_algorithm_is_trained_once_and_compared(monkeypatch, tmp_path, capsys):
    commands = train(monkeypatch, {"grpo": 0.3, "dapo": 0.1})
    assert bench_of(tmp_path, "--algorithms", "grpo,dapo", "trainer.lr=1e-3") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["algorithms"]["grpo"] == {
        "first": 0.2, "last": 0.5, "gain": pytest.approx(0.3), "step_seconds": 1.5,
    }  # fmt: skip
    met = {name: goal["met"] for name, goal in result["goals"].items()}
    assert met == {"grpo: reward gained": True, "dapo: reward gained": False}
    assert (tmp_path / "out/rewards.png").stat().st_size > 10_000
    assert all("trainer.lr=1e-3" in command for command in commands)
    assert bench_of(tmp_path, "--algorithms", "grpo") == 0
    assert len(commands) == 2, "a run that is whole is not run again"


def test_a_run_that_ends_early_is_named(monkeypatch, tmp_path):
    train(monkeypatch, {"grpo": 0.3}, exit_code=1)
    with pytest.raises(BenchmarkError, match="grpo ended with exit code 1 before step 12"):
        bench.run("grpo", tmp_path / "grpo", bench.RECIPE, 12, [])


def test_an_unknown_algorithm_is_refused_before_anything_runs(monkeypatch, tmp_path, capsys):
    commands = train(monkeypatch, {})
    assert bench_of(tmp_path, "--algorithms", "grop") == 2
    assert "grpo" in capsys.readouterr().err and not commands
