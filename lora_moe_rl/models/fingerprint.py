"""Which base model an adapter belongs to: what a checkpoint keeps of it, and whether it changed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lora_moe_rl.errors import ModelError

# What is hashed of a tensor: its first bytes, which any training of it would change; in each file
# of so many at most whose names differ in their numbers alone, as those of experts.
HASHED_BYTES, ALIKE = 1 << 10, 64
LONGEST_HEADER = 1 << 27  # bytes


def base_record(path: str, directory: Path, revision: str | None = None) -> dict[str, Any]:
    """What a checkpoint keeps of a base, as JSON: its name, the `revision` of it on the hub, its
    config.json and its fingerprint."""
    return {
        "path": path,
        "revision": revision,
        "config": json.loads((directory / "config.json").read_text()),
        "fingerprint": fingerprint(directory),
    }


def fingerprint(directory: Path) -> str:
    """SHA-256 over config.json, over name, size and header of each weight file, and over the first
    bytes of its tensors: a merge into any of its linears is seen.

    It does not see a change deep inside a tensor alone: a model has many gigabytes.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            for piece in _pieces(file):
                digest.update(piece)
    return digest.hexdigest()


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """What is hashed of a weight file. One that is none is hashed as far as a header may reach."""
    size = file.read(8)
    header = file.read(min(int.from_bytes(size, "little"), LONGEST_HEADER))
    yield size + header
    try:
        entries = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        places = {name: int(entry["data_offsets"][0]) for name, entry in entries.items()}
    except (ValueError, AttributeError, KeyError, TypeError, IndexError, RecursionError):
        return
    start, alike = 8 + len(header), dict[str, list[int]]()
    for name, place in sorted(places.items()):
        alike.setdefault(re.sub(r"\d+", "#", name), []).append(place)
    chosen = (one for some in alike.values() for one in some[:: -(-len(some) // ALIKE)])
    for place in sorted(chosen):
        file.seek(start + place)
        yield file.read(HASHED_BYTES)


def check_unchanged(record: dict[str, Any], directory: Path) -> None:
    """Raises ModelError when `directory` is not the base of the record."""
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} has no config.json: it is not a Hugging Face model directory"
        )
    now = json.loads((directory / "config.json").read_text())
    changed = sorted(
        key for key in record["config"] | now if record["config"].get(key) != now.get(key)
    )
    if changed:
        values = ", ".join(
            f"{k} was {record['config'].get(k)}, is {now.get(k)}" for k in changed[:3]
        )
        raise ModelError(
            f"{directory} is not the base of this adapter ({record['path']}): in its config.json "
            f"{values}. Give the base as it was when the run was made"
        )
    if fingerprint(directory) != record["fingerprint"]:
        raise ModelError(
            f"{directory} is not the base of this adapter ({record['path']}): its config.json says "
            f"the same, and its weight files are others than when the run was made. Give the base "
            f"as it was"
        )
