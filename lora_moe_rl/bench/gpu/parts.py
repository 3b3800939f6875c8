"""What a stage has found so far: a file that is written anew after each part of it.

A stage that is ended in the middle keeps what it had.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_moe_rl.files.replacing import replace_file

ENDS = "LORA_MOE_RL_STAGE_ENDS"  # when a stage is ended, by time.monotonic of its machine
WITHOUT_END_S = 600.0  # of a stage that nobody ends
SPARE_S = 5.0  # in which a part that was ended is written down


class Parts:
    """The parts of one stage. The file is the truth: processes of a stage that wait for each other
    may all put into it."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def values(self) -> dict[str, Any]:
        return read_json(self.path) or {}

    @property
    def failed(self) -> list[str]:
        return list(errors(self.values))

    def put(self, name: str, value: Any) -> None:
        write_json(self.path, self.values | {name: value})
        print(f"{name}: {json.dumps(value, default=str)[:2000]}", flush=True)

    def part(self, name: str, call: Callable[[], Any]) -> bool:
        """Puts what `call` returns. What it raises becomes the part's `error`, beside the figures
        that were put before, and the stage goes on with the next one. Returns whether all went
        well."""
        try:
            self.put(name, call())
        except Exception as error:
            traceback.print_exc()
            found = self.values.get(name)
            found = found if isinstance(found, dict) else {}
            self.put(name, found | {"error": f"{type(error).__name__}: {error}"[:2000]})
            return False
        return True


def errors(values: dict[str, Any]) -> dict[str, str]:
    """What went wrong, by part."""
    return {
        name: part["error"]
        for name, part in values.items()
        if isinstance(part, dict) and "error" in part
    }


def left_s() -> float:
    """Seconds that this stage has left for its parts."""
    ends = os.environ.get(ENDS)
    return WITHOUT_END_S if ends is None else max(float(ends) - time.monotonic() - SPARE_S, 1.0)


def write_json(path: Path, value: Any) -> None:
    replace_file(path, (json.dumps(value, indent=1, default=str) + "\n").encode())


def read_json(path: Path) -> dict[str, Any] | None:
    """What a file holds; None when there is none, or it is not a JSON object."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
