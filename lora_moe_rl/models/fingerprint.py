"""Which base model an adapter belongs to: what a checkpoint keeps of it, and whether it changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lora_moe_rl.errors import ModelError

# What is hashed of each weight file: its header and its first tensors, which another training
# would change.
HASHED_BYTES = 1 << 20


def base_record(path: str, directory: Path) -> dict[str, Any]:
    """What a checkpoint keeps of a base, as JSON: its name, its config.json and its fingerprint."""
    return {
        "path": path,
        "config": json.loads((directory / "config.json").read_text()),
        "fingerprint": fingerprint(directory),
    }


def fingerprint(directory: Path) -> str:
    """SHA-256 over config.json, and over name, size and first MiB of each weight file.

    It does not see a change deep inside a file of weights: those have many gigabytes.
    """
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as file:
            digest.update(file.read(HASHED_BYTES))
    return digest.hexdigest()


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
