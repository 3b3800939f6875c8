"""Files of one JSON object a line, and the ends of text files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.files.texts import encodable


def to_json(record: dict[str, Any]) -> str:
    """One line of JSON. NaN and infinities become null: JSON has no word for them. Halves of
    characters become ?: UTF-8 has none."""
    return encodable(json.dumps(finite(record), ensure_ascii=False, allow_nan=False))


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


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a JSONL file, with their ends. Only a line feed ends one: str.splitlines would
    also split at U+2028 and its like, which JSON leaves as they are inside a text."""
    with open(path, "rb") as file:
        yield from file


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
    """Records of later steps, and lines that are none, go to a .bak file beside. What comes before
    the first of them, mostly all of the file, is not written anew."""
    if not path.exists():
        return
    begins = 0
    for line in _lines(path):
        if not _is_until(line, step):
            break
        begins += len(line)
    else:
        return
    with open(path, "r+b") as file:
        file.seek(begins)
        kept = _cut(file, path.with_name(path.name + ".bak"), step)
        file.seek(begins)
        file.writelines(kept)  # in the place of lines that go: nothing is lost in between
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _is_until(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def _cut(lines: Iterable[bytes], backup: Path, step: int) -> list[bytes]:
    """Appends to `backup` the lines that go, all or, when the disk refuses, none; returns those
    that stay: of evaluations, which may come after the steps that follow them."""
    kept, before = [], backup.stat().st_size if backup.exists() else 0
    try:
        with open(backup, "ab") as file:
            for line in lines:
                if _is_until(line, step):
                    kept.append(line)
                else:
                    file.write(line if line.endswith(b"\n") else line + b"\n")
    except OSError:
        with suppress(OSError):
            os.truncate(backup, before)
        raise
    return kept
