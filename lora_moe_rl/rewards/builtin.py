"""Rewards that need no code of one's own: `reward.function=lora_moe_rl.rewards:exact_match`."""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Real
from typing import Any

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def exact_match(completions: list, answer: list, **_) -> list[float | None]:
    """1 where the completion is the answer, but for white space around it; else 0. Not applicable
    (None) to a row without an answer."""
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        wanted = answer_text(expected)
        same = wanted is not None and completion_text(completion).strip() == wanted.strip()
        rewards.append(None if wanted is None else float(same))
    return rewards


def number_match(completions: list, answer: list, **_) -> list[float | None]:
    """1 where the last number of the completion equals the last number of the answer; else 0.

    Thousands commas are ignored; 3 equals 3.0. An answer without a number, or none at all, is not
    applicable (None).
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        text = answer_text(expected)
        wanted = None if text is None else last_number(text)
        found = last_number(completion_text(completion))
        rewards.append(None if wanted is None else float(found == wanted))
    return rewards


def last_number(text: str) -> Decimal | None:
    """The last number written in digits, or None. A minus right after a digit is a subtraction."""
    found = None
    for match in NUMBER.finditer(text):
        digits = match.group().replace(",", "")
        if digits[0] in "+-" and match.start() and text[match.start() - 1].isdigit():
            digits = digits[1:]
        found = Decimal(digits)
    return found


def answer_text(answer: Any) -> str | None:
    """The right answer of a row as a text: of a number all its digits, without an exponent, and of
    a whole one no point (columns with gaps turn 81 into 81.0). None where there is none (null,
    NaN). Raises TypeError for what is neither."""
    if answer is None or isinstance(answer, str):
        return answer
    if isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, Real | Decimal):
        raise TypeError(
            f"the answer {answer!r:.80} is no text and no number: name a column of texts with "
            "data.answer_key, or judge by a reward of your own"
        )
    if answer != answer:
        return None
    digits = format(Decimal(str(answer)), "f")
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def completion_text(completion: Any) -> str:
    """The text of a completion, which is a list of one message when the prompt has messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
