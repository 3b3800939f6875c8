"""Rows of a JSONL or parquet file, or of a data set on the hub."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from lora_moe_rl.config import DataConfig
from lora_moe_rl.errors import DataError

SUFFIXES = (".jsonl", ".parquet")


def is_hub(path: str) -> bool:
    """True when data.path names a data set of the hub: it looks like no path, whether or not such a
    file is there."""
    return not (path.startswith(("/", ".", "~")) or path.endswith(SUFFIXES))


def read_rows(config: DataConfig) -> list[tuple[str, dict[str, Any]]]:
    """All rows of `config.path`, or its first `config.limit`, each with the place where it stands.

    A local file is read directly (`import datasets` takes seconds). Raises DataError for a file
    that is absent, empty or malformed, and for a hub data set that cannot be had.
    """
    assert config.path is not None
    path = Path(config.path).expanduser()
    if path.suffix == ".jsonl" and path.is_file():
        rows = list(islice(_jsonl(path), config.limit))
    elif path.suffix == ".parquet" and path.is_file():
        rows = list(islice(_parquet(path), config.limit))
    elif path.exists():
        raise DataError(f"data.path={config.path} is not a {' or '.join(SUFFIXES)} file")
    elif path.suffix in SUFFIXES or path.is_absolute() or config.path.startswith("."):
        raise DataError(f"data.path={config.path}: there is no such file")
    else:
        rows = list(islice(_hub(config.path, config.subset, config.split), config.limit))
    if not rows:
        raise DataError(f"data.path={config.path} has no rows")
    return rows


def _jsonl(path: Path):
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                # utf-8-sig: some editors put a byte order mark before the first line.
                yield place, json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:  # malformed UTF-8 too
                raise DataError(f"{place}: not a line of JSON: {error}") from error


def _parquet(path: Path):
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error


def _hub(name: str, subset: str | None, split: str):
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # offline, absent, gated, no such split: each its own kind
        raise DataError(
            f"data.path={name!r} is no local file, and could not be fetched from the hub (subset "
            f"{subset!r}, split {split!r}): {type(error).__name__}: {error}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{name} ({split}), row {number}", dict(row)
