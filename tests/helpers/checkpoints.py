"""Checkpoints as a run writes them, in one go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from lora_moe_rl.files import checkpoint_writing
from lora_moe_rl.files.checkpoint_writing import prune

FILES = ("trainer_00000.safetensors", "data/position.json")


@contextmanager
def write_checkpoint(
    root: Path, step: int, keep: int, metadata: dict[str, Any], written=None, **more
) -> Iterator[Path]:
    """Yields the directory to write files into. Only `keep` and those of `also` stay after it."""
    with checkpoint_writing.write_checkpoint(root, step, metadata, written) as directory:
        yield directory
    prune(root, step, keep, **more)


def write(root: Path, step: int, keep: int = 2) -> Path:
    metadata = {"step": step, "data": {"row": step * 16}}
    with write_checkpoint(root, step, keep, metadata) as directory:
        save_file({"w": np.full(50, step, np.float32)}, directory / FILES[0])
        (directory / "data").mkdir()
        (directory / FILES[1]).write_text(json.dumps({"row": step}))
        metadata["late"] = [step]
    return root / f"step-{step:06d}"


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())
