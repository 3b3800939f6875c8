"""What of a response is its answer."""

from __future__ import annotations

import pytest

from lora_moe_rl.evaluation.answers import answer_of


@pytest.mark.parametrize(
    ("how", "response", "same"),
    [
        ("text", " 42\n", "42"),
        ("number", "It is 1,000.", "1000.0"),
        ("number", "5-3=2", "2"),
        ("boxed", r"so \boxed{1} no, \boxed{\frac{1}{2}}.", r"\boxed{ \frac{1}{2} }"),
    ],
)
def test_responses_with_the_same_answer(how, response, same):
    found = answer_of(how, response)
    assert found is not None and found == answer_of(how, same)


@pytest.mark.parametrize(
    ("how", "response"),
    [("text", " \n"), ("number", "none"), ("boxed", "42"), ("boxed", r"\boxed{\frac{1}{2"),
     ("boxed", r"\boxed{}")],
)  # fmt: skip
def test_responses_without_an_answer(how, response):
    assert answer_of(how, response) is None


def test_a_last_box_that_is_cut_off_does_not_leave_the_vote_to_the_one_before():
    assert answer_of("boxed", r"\boxed{1} and then \boxed{2") is None
