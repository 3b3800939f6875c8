"""What is in a set of rows, as one short text: a resumed run asks whether it is still the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import xxhash

FIRST_ROWS = 8  # of a generator, which may be endless


def content_of(rows: Iterable[Any]) -> str:
    """XXH3 (128 bits, as hex) of the rows' values in their order."""
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(_text_of(row).encode() + b"\n")
    return digest.hexdigest()


def _text_of(row: Any) -> str:
    try:
        return json.dumps(row, sort_keys=True, default=_plain)
    except (TypeError, ValueError):  # keys that JSON has not, or that cannot be sorted; a circle
        return repr(row)


def _plain(value: Any) -> str:
    """A value that JSON has no form for, as text. Of an object (an image of a hub data set) only
    the kind counts: its text may hold an address in memory."""
    known = isinstance(value, bytes | date | time | timedelta | Decimal)
    return repr(value) if known else type(value).__name__
