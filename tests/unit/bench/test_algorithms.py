"""Algorithms beside each other: what is read of their runs, and what is said of it."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from lora_moe_rl import cli
from lora_moe_rl.bench import algorithms as bench
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.recipes import resolved


def records(steps, gain):
    return [
        {"step": n, "reward/mean": 0.2 + gain * (n > steps // 2), "time/step": 1.0 + n % 2}
        for n in range(1, steps + 1)
    ]


def train(monkeypatch, gains):
    """Stands for `lora-moe-rl train`, which writes metrics.jsonl. Returns the commands."""
    commands = []

    def run(command, stdout):
        commands.append(command)
        values = dict(word.split("=", 1) for word in command if "=" in word)
        folder = bench.Path(values["logging.run_dir"])
        folder.mkdir()
        steps = int(values["trainer.steps"])
        lines = records(steps, gains[values["algorithm.name"]])
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "metrics.jsonl").write_text(text)
        (folder / "config.yaml").write_text(to_yaml(resolved(command[4], command[5:])))
        return SimpleNamespace(returncode=0)

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
    assert bench_of(tmp_path, "--algorithms", "grpo", "trainer.lr=1e-3") == 0
    assert len(commands) == 2, "a run that is whole is not run again"
    assert bench_of(tmp_path, "--algorithms", "grpo") == 1
    assert "a run of other settings: trainer.lr=0.001" in capsys.readouterr().err


TEACHER = ("--teacher-url", "http://host:8000/v1", "--teacher-model", "sage")


def test_one_that_learns_from_a_teacher_is_there_with_one_and_tells_no_other_of_it(
    monkeypatch, tmp_path, capsys
):
    commands = train(monkeypatch, dict.fromkeys(bench.presets(with_teacher=True), 0.3))
    assert bench_of(tmp_path, *TEACHER) == 0
    found = json.loads(capsys.readouterr().out)["algorithms"]
    assert {"grpo", "vapo", "opd"} <= found.keys() and not {"sft", "dpo"} & found.keys()
    every = [c for c in commands if any("teacher" in word for word in c)]
    for name, taught in zip(("distillation", "opd"), every, strict=True):
        settings = [f"name={name}", "teacher_url=http://host:8000/v1", "teacher_model=sage"]
        assert {f"algorithm.{setting}" for setting in settings} <= set(taught)
    (critic,) = [c for c in commands if "algorithm.name=vapo" in c]
    assert {"algorithm.critic_warmup=5", "algorithm.length_alpha=2.0"} <= set(critic)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--algorithms", "grpo,opd"], "opd learns from a teacher; name its server by"),
        (["--algorithms", "opd", *TEACHER[:2]], "--teacher-url and --teacher-model go together"),
        (["--algorithms", "grpo", *TEACHER], "has no effect: none of grpo learns from a teacher"),
    ],
)
def test_half_a_teacher_none_or_one_for_nobody_is_refused(
    monkeypatch, tmp_path, capsys, words, reason
):
    commands = train(monkeypatch, {})
    assert bench_of(tmp_path, *words) == 2
    assert reason in capsys.readouterr().err and not commands


def test_an_unknown_algorithm_is_refused_before_anything_runs(monkeypatch, tmp_path, capsys):
    commands = train(monkeypatch, {})
    assert bench_of(tmp_path, "--algorithms", "grop") == 2
    assert "grpo" in capsys.readouterr().err and not commands
