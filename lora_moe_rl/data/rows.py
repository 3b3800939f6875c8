"""Rows of a JSONL, CSV or parquet file, of a saved data set, or of one on the hub."""

from __future__ import annotations

import csv
import json
import re
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from lora_moe_rl.config import SourceConfig
from lora_moe_rl.config.files import without_twins
from lora_moe_rl.errors import DataError

SUFFIXES = (".jsonl", ".parquet", ".csv")
OTHERS = (".json", ".txt", ".tsv", ".arrow", ".gz", ".zst", ".zip")  # files too, none that is read
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
SAVED = "state.json"  # what datasets' save_to_disk writes


def is_hub(path: str) -> bool:
    """True when data.path can name a data set of the hub (owner/name, or a name alone): it looks
    like no path, whether or not such a file is there."""
    return HUB_NAME.fullmatch(path) is not None and not path.endswith(SUFFIXES + OTHERS)


def read_rows(config: SourceConfig) -> list[tuple[str, dict[str, Any]]]:
    """All rows of `config.path`, or its first `config.limit`, each with the place where it stands.

    A local file is read directly (`import datasets` takes seconds). Raises DataError for a file
    that is absent, empty or malformed, and for a hub data set that cannot be had.
    """
    assert config.path is not None
    path, named = Path(config.path).expanduser(), f"{config.key('path')}={config.path}"
    if path.suffix == ".jsonl" and path.is_file():
        rows = list(islice(_jsonl(path), config.limit))
    elif path.suffix == ".parquet" and path.is_file():
        rows = list(islice(_parquet(path), config.limit))
    elif path.suffix == ".csv" and path.is_file():
        rows = list(islice(_csv(path), config.limit))
    elif (path / SAVED).is_file():
        rows = list(islice(_saved(path), config.limit))
    elif path.exists():
        raise DataError(
            f"{named} is not a {' or '.join(SUFFIXES)} file, and not a directory "
            f"of one split that datasets' save_to_disk wrote (it has no {SAVED}){_shards_in(path)}"
        )
    elif not is_hub(config.path):
        several = "; several files are several sets, data.sets.NAME.path=FILE each"
        hint = several if "," in config.path else ""
        raise DataError(f"{named}: there is no such file{hint}")
    else:
        rows = list(islice(_hub(config), config.limit))
    if not rows:
        raise DataError(f"{named} has no rows")
    return rows


def _shards_in(path: Path) -> str:
    """The way out for a directory of splits, or of shards: which of its files are of the split
    nobody knows."""
    if splits := sorted(one.parent.name for one in path.glob(f"*/{SAVED}")):
        return f"; it holds splits: name one, {' or '.join(str(path / s) for s in splits)}"
    found = sorted(one.name for one in path.glob("*") if one.suffix in SUFFIXES)
    if not found:
        return ""
    more = ", ..." if len(found) > 1 else ""
    return (
        f"; it holds {found[0]}{more}: name one file, or make one data set of several: "
        f"datasets.load_dataset({str(path)!r}, split='train').save_to_disk(DIR)"
    )


@contextmanager
def _opened(path: Path, mode: str = "r", encoding: str | None = None, newline: str | None = None):
    """Raises DataError where the disk refuses, at once or later on."""
    try:
        with path.open(mode, encoding=encoding, newline=newline) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _jsonl(path: Path):
    with _opened(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                # utf-8-sig: some editors put a byte order mark before the first line.
                yield place, json.loads(line.decode("utf-8-sig"), object_pairs_hook=without_twins)
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


def _csv(path: Path):
    """All values are texts; the first line names the columns."""
    with _opened(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            names = list(reader.fieldnames or ())
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"{path}, line 1: it names {', '.join(twice)} twice")
            for row in reader:
                place = f"{path}, line {reader.line_num}"
                if None in row or None in row.values():
                    columns = len(reader.fieldnames or ())
                    raise DataError(f"{place}: it has not the {columns} values of the first line")
                yield place, row
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read as CSV in UTF-8: {error}") from error


def _saved(path: Path):
    import datasets

    try:
        rows = datasets.load_from_disk(str(path))
    except Exception as error:  # of arrow, of datasets, of the disk
        raise DataError(f"{path} cannot be read as a saved data set: {error}") from error
    for number, row in enumerate(rows):
        yield f"{path}, row {number}", dict(row)


def _hub(config: SourceConfig):
    import datasets

    name, subset, split = config.path, config.subset, config.split

    try:
        rows = datasets.load_dataset(str(name), subset, split=split)
    except Exception as error:  # offline, absent, gated, no such split: each its own kind
        raise DataError(
            f"{config.key('path')}={name!r} is no local file, and could not be fetched from the "
            f"hub (subset {subset!r}, split {split!r}): {type(error).__name__}: {error}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{name} ({split}), row {number}", dict(row)
