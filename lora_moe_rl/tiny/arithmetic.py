"""Two-operand addition and subtraction, written out in digits: "23+58=" and "81".

The tiny models are pre-trained on these problems and the demo trains on them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

MAX_PROMPT_TOKENS = len("99+99=")
MAX_ANSWER_TOKENS = len("198") + 1  # with the end-of-sequence token


def problem(rng: random.Random) -> tuple[str, str]:
    """One problem: its prompt and its answer.

    Each operand has one or two digits, equally likely, so that easy problems are common enough to
    learn from early on. No answer is negative: the larger operand of a subtraction comes first.
    """
    a, b = (rng.randrange(10) if rng.random() < 0.5 else rng.randrange(10, 100) for _ in range(2))
    if rng.random() < 0.5:
        return f"{a}+{b}=", str(a + b)
    return f"{max(a, b)}-{min(a, b)}=", str(abs(a - b))


def problems(seed: int) -> Iterator[tuple[str, str]]:
    """Problems for ever, the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        yield problem(rng)
