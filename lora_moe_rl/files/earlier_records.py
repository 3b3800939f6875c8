"""Records of a run directory that an earlier version wrote otherwise."""

from __future__ import annotations

from typing import Any


def with_drawn(record: dict[str, Any]) -> dict[str, Any]:
    """A line of samples.jsonl, or a group of order.jsonl, as they are written now. Earlier versions
    had the prompt's number under `row`, and its row nowhere."""
    if "drawn" in record or "row" not in record:
        return record
    return {"drawn" if key == "row" else key: value for key, value in record.items()}
