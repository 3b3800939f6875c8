"""Arithmetic is right to the last digit, and nothing else is worked out."""

from __future__ import annotations

import pytest

from lora_moe_rl.tools import calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 * (4 + 5)", "27"),
        (" 0.1 + 0.2 ", "0.3"),
        ("-7 // 2", "-4"),
        ("7 % 4 - 1/4", "2.75"),
        ("1/3", "0.333333333333"),
        ("99999999999999999999 + 1", "100000000000000000000"),
    ],
)
def test_arithmetic(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize("expression", ["2 ** 9", "abs(1)", "'a' * 9", "1e999", "True", "x"])
def test_what_is_not_arithmetic_is_refused(expression):
    with pytest.raises(ValueError):
        calculator(expression)


def test_a_long_expression_is_refused():
    with pytest.raises(ValueError, match="more than 200 characters"):
        calculator("1+" * 200 + "1")
