"""routes.jsonl, of any length: how often experts were chosen, in one step and in one layer."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.data.kept import spread
from lora_moe_rl.page.growing import LinesByKey

# How a line begins: the rest of it, which may be a hundred kilobytes, is read when it is shown.
HEAD = re.compile(rb'\{"step": (\d+),')
COLUMNS = 200  # steps that are shown of a layer
NUMBERS_SENT = 400_000  # of a run in one file


class RouteLines:
    def __init__(self, path: Path):
        self._lines = LinesByKey(path, _step_of)
        self._lock = threading.Lock()

    def of_step(self, last: int | None) -> dict[str, Any]:
        """JSON: the numbers of the first and the newest step, and the record of the newest step up
        to `last` (None: of all)."""
        with self._lock:
            steps = self._steps()
            wanted = [step for step in steps if last is None or step <= last] or steps[:1]
            return {
                "first": steps[0] if steps else None,
                "newest": steps[-1] if steps else None,
                "shown": self._lines.read(wanted[-1]) if wanted else None,
            }

    def of_layer(self, layer: int) -> dict[str, Any]:
        """JSON: the loads of a layer in up to COLUMNS steps."""
        with self._lock:
            chosen, loads = [], []
            for step in _some(self._steps(), COLUMNS):
                record = self._lines.read(step)
                if record is not None and layer in record["layers"]:
                    chosen.append(step)
                    loads.append(record["loads"][record["layers"].index(layer)])
            return {"layer": layer, "steps": chosen, "loads": loads}

    def some(self) -> dict[str, Any]:
        """JSON: the records of as many steps, spread evenly with the newest among them, as make
        NUMBERS_SENT numbers at most."""
        with self._lock:
            steps = self._steps()
            if not steps or (newest := self._lines.read(steps[-1])) is None:
                return {"first": None, "newest": None, "records": []}
            numbers = sum(map(len, newest["loads"]))
            most = min(COLUMNS, max(1, NUMBERS_SENT // max(numbers, 1)))
            records = [record for step in _some(steps, most) if (record := self._lines.read(step))]
            return {"first": steps[0], "newest": steps[-1], "records": records}

    def _steps(self) -> list[int]:
        self._lines.refresh()
        return sorted(self._lines.places)


def _step_of(line: bytes) -> int | None:
    return int(head[1]) if (head := HEAD.match(line)) else None


def _some(steps: Sequence[int], most: int) -> list[int]:
    """Up to `most` of the steps, spread evenly, the last one among them."""
    newest_first = steps[::-1]
    return [newest_first[place] for place in spread(len(steps), most)][::-1]
