"""A step as one line of the console."""

from __future__ import annotations

import json

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.telemetry import console, names
from lora_moe_rl.telemetry.console import StepLines

RECORD = {"step": 3, names.REWARD: 0.5, names.STEP_SECONDS: 2.0, names.GRAD_NORM: 0.125}
RECORD |= {names.IDLE_TRAINER: 0.25, names.IDLE_ENGINES: 0.75}
CONFIGS = {
    "on policy": {},
    "ahead, two epochs": {"schedule": {"lag": 1}, "algorithm": {"epochs": 2}},
    "sft": {"algorithm": {"name": "sft"}},
    "dpo": {"algorithm": {"name": "dpo"}},
}


@pytest.mark.parametrize("settings", CONFIGS.values(), ids=CONFIGS)
def test_it_fits_80_columns_and_keeps_what_says_whether_it_learns(settings):
    config = RunConfig.model_validate(settings)
    wide, narrow = StepLines(config, 200), StepLines(config, 80)
    assert "gradient" in wide.header
    assert len(narrow.header) == len(narrow.line(RECORD)) <= 80
    assert narrow.header.lstrip().startswith("step ") and narrow.header.endswith(" left")
    first = "loss" if config.offline else "reward"
    assert first in narrow.header and ("mismatch" in narrow.header) != config.offline


def test_the_gradient_goes_first_and_nothing_goes_where_there_is_room():
    config = RunConfig()
    full = StepLines(config, 200).header
    assert StepLines(config, len(full)).header == full
    less = StepLines(config, len(full) - 1).header
    assert full.split() == [*less.split()[:6], "gradient", *less.split()[6:]]


def test_in_a_pipe_a_line_is_as_long_as_it_is():
    assert StepLines(RunConfig()).header == StepLines(RunConfig(), 200).header


@pytest.fixture
def speaking():
    yield console.speak
    console.speak("lines")


def test_in_json_each_step_is_its_record_and_nothing_else_is_said(speaking, capsys):
    speaking("json")
    lines = StepLines(RunConfig())
    for step in (3, 4):
        lines.show(RECORD | {"step": step, names.REWARD: float("nan")})
    console.say("engines are started")
    console.warn("something is wrong")
    out, errors = capsys.readouterr()
    first, second = map(json.loads, out.splitlines())
    assert first == RECORD | {names.REWARD: None} and second["step"] == 4
    assert "something is wrong" in errors


def test_a_quiet_run_says_warnings_alone(speaking, capsys):
    StepLines(RunConfig()).show(RECORD)
    assert capsys.readouterr().out
    speaking("quiet")
    StepLines(RunConfig()).show(RECORD)
    console.say("engines are started")
    console.show("a table")
    console.warn("something is wrong")
    out, errors = capsys.readouterr()
    assert not out and "something is wrong" in errors
