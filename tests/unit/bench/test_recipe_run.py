"""A run that a benchmark makes, or reads where it is whole."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from lora_moe_rl.bench.recipe_run import RECIPE, run
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.config.recipes import resolved
from lora_moe_rl.errors import BenchmarkError

ASKED = ["algorithm.name=grpo"]


def train(monkeypatch, folder, steps, exit_code=0):
    """Stands for `lora-moe-rl train`, which writes so many steps. Returns the commands."""
    commands = []

    def started(command, stdout):
        commands.append(command)
        folder.mkdir(exist_ok=True)
        lines = [json.dumps({"step": step}) + "\n" for step in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        (folder / "config.yaml").write_text(to_yaml(resolved(command[4], command[5:])))
        return SimpleNamespace(returncode=exit_code)

    monkeypatch.setattr(subprocess, "run", started)
    return commands


def test_a_run_that_is_whole_is_read_and_not_made_again(monkeypatch, tmp_path):
    commands = train(monkeypatch, tmp_path / "a", 3)
    for _ in range(2):
        found = run("grpo", tmp_path / "a", RECIPE, 3, ASKED)
        assert [record["step"] for record in found] == [1, 2, 3]
    (command,) = commands
    assert command[-3:] == ["trainer.steps=3", *ASKED, f"logging.run_dir={tmp_path}/a"]


@pytest.mark.parametrize("other", [["trainer.lr=1e-5"], ["algorithm.name=gspo"]])
def test_a_run_of_other_settings_is_not_read_as_if_it_were_this(monkeypatch, tmp_path, other):
    train(monkeypatch, tmp_path / "a", 3)
    run("grpo", tmp_path / "a", RECIPE, 3, ASKED)
    key = other[0].partition("=")[0]
    with pytest.raises(BenchmarkError, match=rf"a run of other settings: .*{key}=.*--out"):
        run("grpo", tmp_path / "a", RECIPE, 3, [*ASKED, *other])
    (tmp_path / "a/config.yaml").unlink()
    with pytest.raises(BenchmarkError, match="a run of other settings"):
        run("grpo", tmp_path / "a", RECIPE, 3, ASKED)


@pytest.mark.parametrize(("steps", "exit_code"), [(11, 1), (11, 0), (12, 1)])
def test_a_run_that_ends_early_or_badly_is_named(monkeypatch, tmp_path, steps, exit_code):
    train(monkeypatch, tmp_path / "a", steps, exit_code)
    with pytest.raises(BenchmarkError, match=f"grpo ended with exit code {exit_code} before step"):
        run("grpo", tmp_path / "a", RECIPE, 12, ASKED)
