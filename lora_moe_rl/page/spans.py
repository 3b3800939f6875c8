"""timeline.jsonl, of any length: the spans of some steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from lora_moe_rl.page.growing import GrowingFile, parse


class Spans:
    """Where the line of each step stands."""

    def __init__(self, path: Path):
        self.path = path
        self._file = GrowingFile(path)
        self._lock = threading.Lock()
        self._lines: dict[int, tuple[int, int]] = {}

    def of_steps(self, last: int | None, count: int) -> dict[str, Any]:
        """JSON: up to `count` steps, the last of which is `last` (None: the newest), each with
        begin, end and spans as the file has them, and the numbers of the first and the newest
        step that there are."""
        with self._lock:
            self._refresh()
            steps = sorted(self._lines)
            wanted = [step for step in steps if last is None or step <= last][-count:]
            return {
                "first": steps[0] if steps else None,
                "newest": steps[-1] if steps else None,
                "steps": [record for step in wanted if (record := self._read(step))],
            }

    def _refresh(self) -> None:
        if self._file.refresh():
            self._lines.clear()
        for offset, line in self._file.read():
            if (record := parse(line)) and isinstance(record.get("step"), int):
                self._lines[record["step"]] = (offset, len(line))

    def _read(self, step: int) -> dict[str, Any] | None:
        offset, length = self._lines[step]
        with open(self.path, "rb") as file:
            file.seek(offset)
            return parse(file.read(length))
