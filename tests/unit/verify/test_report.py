"""Reports of checks: what passes, what is printed, and what is read from a list of names."""

from __future__ import annotations

import json
import math

import pytest

from lora_moe_rl.config.options import names
from lora_moe_rl.errors import ConfigError, RefitError
from lora_moe_rl.verify.compare import LAYOUT_QUANTITIES
from lora_moe_rl.verify.comparisons import Comparisons
from lora_moe_rl.verify.layout_report import Row
from lora_moe_rl.verify.report import Check, finite, first, timed


def test_a_check_passes_on_its_side_of_the_limit_and_nan_on_none():
    assert Check("x", 1.0, 1.0).passed and not Check("x", 1.1, 1.0).passed
    assert Check("x", 1.0, 1.0, at_least=True).passed
    assert not Check("x", 0.9, 1.0, at_least=True).passed
    for at_least in (False, True):
        assert not Check("x", math.nan, 1.0, at_least=at_least).passed
        assert not Check("x", None, 1.0, at_least=at_least).passed


def test_what_is_printed_says_every_figure_and_the_verdict(capsys):
    wrong = Comparisons(
        {"model": "m"}, [Check("peft", 1e-6, 5e-6), Check("merged", math.nan, 5e-6)]
    )
    assert wrong.conclude(as_json=False) == 1
    printed = capsys.readouterr().out
    assert "1.0e-06" in printed and "≤ 5e-06" in printed and "nan" in printed
    assert printed.rstrip().endswith("FAIL")
    assert wrong.conclude(as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["passed"], told["rows"][1]["error"]) == ("m", False, None)
    assert Comparisons({}, [Check("peft", 1e-6, 5e-6)]).conclude(as_json=True) == 0


def test_a_report_of_nothing_does_not_pass():
    assert not Comparisons({}, []).passed


def test_a_layout_of_which_a_quantity_was_not_looked_at_does_not_pass():
    checks = [Check(quantity, 0.0, 1e-5) for quantity in LAYOUT_QUANTITIES]
    assert Row("tp2", 2, checks).passed
    assert not Row("tp2", 2, checks[:-1]).passed and not Row("tp2", 2).passed
    (line,) = Row("tp2", 2, checks[:-1]).faults()
    assert line == "checkpoint: not reached"
    one = Row("Hugging Face", 1, [Check("logprobs", 0.0, 1e-5)], quantities=("logprobs",))
    assert one.passed


def test_numbers_that_are_not_finite_are_null_at_any_depth():
    assert finite({"a": [1.0, math.inf], "b": {"c": (math.nan, "x", 3)}}) == {
        "a": [1.0, None],
        "b": {"c": [None, "x", 3]},
    }


def test_of_many_lines_the_first_are_said_and_how_many_follow():
    assert list(first(["a", "b", "c"], 2)) == ["a", "b", "and 1 more"]
    assert list(first(["a", "b"], 2)) == ["a", "b"]


def test_an_error_of_ours_is_the_row_s_failure_unless_it_is_fatal():
    row = Row("tp2", 2)
    with timed(row):
        raise RefitError("refused")
    assert row.failure == "refused" and row.seconds > 0
    with pytest.raises(RefitError), timed(row, fatal=RefitError):
        raise RefitError("dead")
    assert row.failure == "refused"


def test_names_are_read_once_each_and_unknown_ones_are_refused():
    assert names(" tp2, ep2,tp2,", "--layouts", "a layout") == ["tp2", "ep2"]
    with pytest.raises(ConfigError, match="--engines names no engine"):
        names(" ,", "--engines", "an engine")
    with pytest.raises(ConfigError, match="--engines: 'x' is not an engine; there are a, b"):
        names("a,x", "--engines", "an engine", ("a", "b"))
