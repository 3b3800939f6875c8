"""The reward functions that are there, called by hand."""

import numpy as np
import pytest

from lora_moe_rl.rewards import exact_match, math_verify, number_match


def test_exact_match():
    message = [{"role": "assistant", "content": "81"}]
    completions = ["81", " 81\n", "81.", "", message]
    assert exact_match(completions, answer=["81", 81, "81", "81", "81"]) == [1, 1, 0, 0, 1]


def test_number_match():
    cases = [
        ("it is 81", "81", 1), ("81, no: 82", "81", 0), ("1,234.50", 1234.5, 1), ("", "3", 0),
        ("-3", "-3", 1), ("5-3", "3", 1), ("#### 72", "so 70+2\n#### 72", 1), ("3", "none", None),
        (".5", "0.50", 1), ("81.", "81", 1),
    ]  # fmt: skip
    completions, answers, expected = (list(column) for column in zip(*cases, strict=True))
    assert number_match(completions, answer=answers) == expected


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("18", "the answer is $18$.", 1.0),
        ("18", "first 18, then \\boxed{19}", 0.0),
        ("\\frac{1}{2}", "so \\boxed{0.5}", 1.0),
        ("$\\{1,2\\}$", "\\boxed{\\{2,1\\}}", 1.0),
        ("(1,2]", "$(1,2]$", 1.0),
        ("He has 2 left.\n#### 1,234", "It is 1234.", 1.0),
        ("She pays $3 and $4, so 7 in all.\n#### 7", "\\boxed{7}", 1.0),
        ("She pays $3 and $4, so 7 in all.\n#### 7", "\\boxed{3}", 0.0),
        ("a solution, so $\\boxed{\\frac{14}{3}}$.", "\\boxed{14/3}", 1.0),
        ("72", [{"role": "assistant", "content": "so 72"}], 1.0),
        ("5", "no idea", 0.0),
        ("", "5", None),
    ],
)
def test_math_verify(answer, completion, reward):
    assert math_verify([completion], [answer]) == [reward]


def test_a_row_without_an_answer_has_no_reward():
    for none in (None, float("nan"), np.nan):
        for reward in (exact_match, number_match, math_verify):
            assert reward(["None", "nan"], answer=[none, none]) == [None, None]


def test_answers_that_are_numbers_have_the_digits_that_a_model_writes():
    assert exact_match(["81", "0.00001", "2.5"], answer=[81.0, 1e-5, 2.5]) == [1, 1, 1]
    assert number_match(["0.00001", "-5"], answer=[1e-5, 1e-5]) == [1, 0]
    assert exact_match(["100", "7"], answer=[1e2, np.int64(7)]) == [1, 1]
    assert exact_match(["True"], answer=[True]) == [1]
    for reward in (exact_match, number_match, math_verify):
        with pytest.raises(TypeError, match="the answer .*is no text and no number"):
            reward(["2"], answer=[["2", "2.0"]])
