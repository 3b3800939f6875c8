"""Files of one JSON object a line, and the ends of text files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.files.replacing import replace_file


def to_json(record: dict[str, Any]) -> str:
    """One line of JSON. NaN and infinities become null: JSON has no word for them."""
    return json.dumps(finite(record), ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """The value with None for NaN and infinities, in maps and lists of it too."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file. A last line that was cut off in the middle is left out."""
    if path.exists():
        for line in _lines(path):
            try:
                yield json.loads(line)
            except ValueError:
                return


def _lines(path: Path) -> list[bytes]:
    """The lines of a JSONL file, with their ends. Only a line feed ends one: str.splitlines would
    also split at U+2028 and its like, which JSON leaves as they are inside a text."""
    with open(path, "rb") as file:
        return file.readlines()


LINE_BYTES = 400  # as long as most are


def tail(path: Path, num_lines: int) -> str:
    """The last lines of a text file; '' when there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_lines * LINE_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-num_lines:])


def cut_after(path: Path, step: int) -> None:
    """Records of later steps, and lines that are none, go to a .bak file beside."""
    if not path.exists():
        return
    kept, cut = [], []
    for line in _lines(path):
        try:
            keep = line.endswith(b"\n") and json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError):
            keep = False
        (kept if keep else cut).append(line)
    if cut:
        with open(path.with_name(path.name + ".bak"), "ab") as backup:
            backup.writelines(line if line.endswith(b"\n") else line + b"\n" for line in cut)
        replace_file(path, b"".join(kept))
