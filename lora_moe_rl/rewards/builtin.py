"""Rewards that need no code of one's own: `reward.function=lora_moe_rl.rewards:exact_match`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def exact_match(completions: list, answer: list, **_) -> list[float]:
    """1 where the completion is the answer, but for white space around it; else 0."""
    return [
        float(completion_text(completion).strip() == str(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def number_match(completions: list, answer: list, **_) -> list[float | None]:
    """1 where the last number of the completion equals the last number of the answer; else 0.

    Thousands commas are ignored; 3 equals 3.0. An answer without a number is not applicable (None).
    """
    rewards: list[float | None] = []
    for completion, expected in zip(completions, answer, strict=True):
        wanted = last_number(str(expected))
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


def completion_text(completion: Any) -> str:
    """The text of a completion, which is a list of one message when the prompt has messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
