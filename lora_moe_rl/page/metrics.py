"""metrics.jsonl as columns, one row a step."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.page.growing import GrowingFile, parse

LOST = "NaN"  # a number that was logged and is not finite; JSON has no word for it


class MetricsTable:
    """Columns of one run's metrics, as far as it has come. Several lines of one step (an evaluation
    has one of its own) are one row. Where a step has no such metric a column has None, where it was
    logged without a finite number LOST."""

    def __init__(self, path: Path):
        self._file = GrowingFile(path)
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.steps: list[int] = []
        self._rows: dict[int, int] = {}
        self._columns: dict[str, list[float | str | None]] = {}
        self._lines = 0
        self._changed: list[int] = []  # of each row, the count of lines that last changed it

    def names(self) -> list[str]:
        """The names of all metrics that have had a number so far, sorted."""
        with self._lock:
            self._refresh()
            return sorted(self._columns)

    def columns(self, names: Sequence[str], since: int = 0, generation: int = 0) -> dict[str, Any]:
        """JSON: rows that have changed since the answer whose `lines` was `since`, if it was of
        this `generation`; else all of them (`whole`)."""
        with self._lock:
            self._refresh()
            if generation != self._file.generation:
                since = 0
            rows = [i for i, lines in enumerate(self._changed) if lines > since]
            return {
                "generation": self._file.generation,
                "lines": self._lines,
                "whole": since == 0,
                "steps": [self.steps[i] for i in rows],
                "columns": {name: self._column(name, rows) for name in names},
            }

    def _column(self, name: str, rows: Sequence[int]) -> list[float | str | None]:
        values = self._columns.get(name, [])
        return [values[i] if i < len(values) else None for i in rows]

    def _refresh(self) -> None:
        if self._file.refresh():
            self._clear()
        for _, line in self._file.read():
            self._lines += 1
            record = parse(line)
            if record is not None and isinstance(record.get("step"), int):
                self._add(record)

    def _add(self, record: dict[str, Any]) -> None:
        step = record.pop("step")
        row = self._rows.setdefault(step, len(self.steps))
        if row == len(self.steps):
            self.steps.append(step)
            self._changed.append(0)
        self._changed[row] = self._lines
        for name, value in record.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._put(name, row, value)
            elif value is None and name in self._columns:
                self._put(name, row, LOST)

    def _put(self, name: str, row: int, value: float | str) -> None:
        values = self._columns.setdefault(name, [])
        values.extend([None] * (row + 1 - len(values)))
        values[row] = value
