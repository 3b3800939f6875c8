"""Steps of a run as a user names them: `3-5`, `3,7-9`, a list of both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

MOST = 10_000  # of one range


def steps_of(key: str, value: Any) -> tuple[int, ...]:
    """`value` of the setting `key` as step numbers, ascending, each once. Raises ValueError for
    what is none."""
    if isinstance(value, str):
        value = value.split(",")
    given = list(value) if isinstance(value, Iterable) else [value]
    return tuple(sorted({step for one in given for step in _range(key, one)}))


def _range(key: str, one: Any) -> Iterator[int]:
    """Of a number, or of FIRST-LAST."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(one).strip())
    first, last = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
    if found is None or isinstance(one, bool) or not 1 <= first <= last:
        raise ValueError(
            f"{key}={one} names no steps: write one (3), a range (3-5) or several (3,7-9); the "
            "first step is 1"
        )
    if last - first >= MOST:
        raise ValueError(f"{key}={one} names {last - first + 1} steps; name {MOST} at most")
    return iter(range(first, last + 1))
