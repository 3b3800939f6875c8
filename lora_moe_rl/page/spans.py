"""timeline.jsonl, of any length: the spans of some steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from lora_moe_rl.page.growing import LinesByKey, parse


class Spans:
    def __init__(self, path: Path):
        self._lines = LinesByKey(path, _step_of)
        self._lock = threading.Lock()

    def of_steps(self, last: int | None, count: int) -> dict[str, Any]:
        """JSON: up to `count` steps, the last of which is `last` (None: the newest), each with
        begin, end and spans as the file has them, and the numbers of the first and the newest
        step that there are."""
        with self._lock:
            steps = self._steps()
            wanted = [step for step in steps if last is None or step <= last][-count:]
            return {
                "first": steps[0] if steps else None,
                "newest": steps[-1] if steps else None,
                "steps": [record for step in wanted if (record := self._lines.read(step))],
            }

    def _steps(self) -> list[int]:
        self._lines.refresh()
        return sorted(self._lines.places)


def _step_of(line: bytes) -> int | None:
    step = (parse(line) or {}).get("step")
    return step if isinstance(step, int) else None
