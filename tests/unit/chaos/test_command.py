"""The command: what it refuses before anything starts, and what its table and exit code say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_moe_rl.chaos import command
from lora_moe_rl.chaos.checks import Check
from lora_moe_rl.chaos.kinds import HEALED, KINDS, RESUMED
from lora_moe_rl.chaos.plan import Fault
from lora_moe_rl.chaos.report import Row, as_json, line, passed, table
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError

RECIPE = str(Path(__file__).parents[3] / "recipes/tiny_arithmetic.py")
GOOD = Row(Fault(7, "rank.kill", 0.5, 3), "process 12", True, HEALED, 9.25)
FINE = [Check("lock is free", True, ".lock")]


def test_the_plan_is_printed_and_nothing_starts(capsys, tmp_path):
    out = tmp_path / "out"
    arguments = [RECIPE, "--plan", "--out", str(out), "trainer.lr=1e-4", "--steps", "200"]
    assert command.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all(line.startswith("planned: step ") for line in lines)
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "bits"], "reward.hang,nan.grad"),
        (["trainer.steps=7"], "trainer.steps is set by --steps"),
        (["logging.run_dir=x"], "logging.run_dir is set by --out"),
        (["--faults", "disk.full", "checkpoint.every=0"], "checkpoint.every=0"),
        (["--rate", "never"], "--rate never"),
    ],
)
def test_what_cannot_be_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        command.main([RECIPE, "--plan", *words])


def test_a_run_on_a_cluster_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ConfigError, match="RAY_ADDRESS"):
        command.main([RECIPE, "--plan"])


def test_a_directory_that_was_used_is_refused(tmp_path):
    command._make(tmp_path / "out")
    with pytest.raises(ConfigError, match="was used before"):
        command._make(tmp_path / "out")


def test_bounds_are_raised_to_what_is_planned_and_no_others():
    faults = [Fault(step, kind, 0, 0) for step, kind in enumerate(["rank.kill", "rank.hang"] * 2)]
    config = RunConfig(trainer={"max_restarts": 2}, rollout={"max_restarts": 2})  # type: ignore[arg-type]
    assert command._raised(config, faults) == ["trainer.max_restarts=4"]
    config = RunConfig(trainer={"max_restarts": 9})  # type: ignore[arg-type]
    assert command._raised(config, faults) == []


@pytest.mark.parametrize(
    "change",
    [{"happened": False}, {"outcome": RESUMED}, {"outcome": "no step since"}, {"seconds": None}],
)
def test_a_fault_is_as_promised_when_it_happened_and_a_step_followed(change):
    assert GOOD.as_promised and passed([GOOD], FINE)
    bad = replace(GOOD, **change)
    assert not bad.as_promised and not passed([GOOD, bad], FINE)
    assert "FAIL" in table([GOOD, bad], FINE) and "FAIL" in line(bad)


def test_a_check_that_fails_fails_the_run():
    assert not passed([GOOD], [*FINE, Check("no process is left", False, "12 python")])


def test_the_table_has_a_line_a_fault_and_a_line_a_check():
    text = table([GOOD], FINE).splitlines()
    assert " ".join(text[2].split()) == "7 rank.kill yes healed healed 9.2 s ok"
    assert " ".join(text[-1].split()) == "lock is free ok .lock"
    assert as_json(GOOD)["kind"] == "rank.kill" and as_json(GOOD)["as_promised"]
    assert set(as_json(GOOD)["promised"].split(" or ")) == KINDS["rank.kill"].promised
