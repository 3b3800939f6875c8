"""What a stage has found so far: a file that is written anew after each part of it.

A stage that is ended in the middle keeps what it had.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_moe_rl.files.replacing import replace_file


class Parts:
    """The parts of one stage. `failed`: the names of those that raised."""

    def __init__(self, path: Path):
        self.path = path
        self.values: dict[str, Any] = {}
        self.failed: list[str] = []

    def put(self, name: str, value: Any) -> None:
        self.values[name] = value
        write_json(self.path, self.values)
        print(f"{name}: {json.dumps(value, default=str)[:2000]}", flush=True)

    def part(self, name: str, call: Callable[[], Any]) -> None:
        """Puts what `call` returns. What it raises becomes the part's `error`, and the stage goes
        on with the next one."""
        try:
            value = call()
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            value = {"error": f"{type(error).__name__}: {error}"[:2000]}
        self.put(name, value)


def write_json(path: Path, value: Any) -> None:
    replace_file(path, (json.dumps(value, indent=1, default=str) + "\n").encode())
