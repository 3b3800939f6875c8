"""The reward of mathematics: does math-verify find the completion's last answer equal to the right
one?

It computes with what a model wrote (`9^{9^{9^9}}`), and may never come back. Its own timeouts are
signals, which do not interrupt the arithmetic of large numbers; they are off here, since rewards
have processes of their own, which are ended after reward.timeout_s (`rewards/runner.py`).
"""

from __future__ import annotations

import logging
from typing import Any

from math_verify import parse, verify

from lora_moe_rl.rewards.builtin import answer_text, completion_text

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no timeout

FINAL = "####"  # what GSM8K writes before its answer


def math_verify(completions: list, answer: list, **_) -> list[float | None]:
    """1 where they are equal, as numbers, expressions, sets or intervals; else 0.

    `answer` may be a bare answer (`\\frac{1}{2}`), one in dollars or in a box, or a whole solution
    that ends in one. One that cannot be read, or is not there, is not applicable (None).
    """
    rewards: list[float | None] = []
    known: dict[str, list[Any]] = {}
    for completion, expected in zip(completions, answer, strict=True):
        text = answer_text(expected) or ""
        if text not in known:
            known[text] = parse_answer(text)
        if not known[text]:
            rewards.append(None)
            continue
        found = _parse(completion_text(completion))
        rewards.append(float(verify(known[text], found, timeout_seconds=0)))
    return rewards


math_verify.by_sample = True  # pyright: ignore[reportFunctionMemberAccess]


def parse_answer(text: str) -> list[Any]:
    """What math-verify makes of the right answer; empty when it makes nothing of it."""
    final = text.rpartition(FINAL)[2].strip()
    if final and not any(mark in final for mark in ("$", "\\boxed", "\\(", "\\[", "\n")):
        return _parse(f"${final}$")
    return _parse(final)


def _parse(text: str) -> list[Any]:
    return parse(text, parsing_timeout=0)
