"""What of a response is its answer, so that equal answers can be counted.

text      the whole response, without white space around it
number    its last number in digits: 1,000 and 1000.0 are one answer
boxed     what stands in its last \\boxed{}, without white space; braces are matched
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from lora_moe_rl.rewards.builtin import last_number

BOXED = "\\boxed{"


def answer_of(how: str, response: str) -> Hashable | None:
    """The answer of a response, None for one that has none. `how` as eval.sets.NAME.answer."""
    return _HOW[how](response)


def _text(response: str) -> str | None:
    return response.strip() or None


def _boxed(response: str) -> str | None:
    begin = response.rfind(BOXED)
    if begin < 0:
        return None
    inside = response[begin + len(BOXED) :]
    depth = 1
    for place, letter in enumerate(inside):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return "".join(inside[:place].split()) or None
    return None  # cut off inside the box


_HOW: dict[str, Callable[[str], Hashable | None]] = {
    "text": _text,
    "number": last_number,
    "boxed": _boxed,
}
