"""Checkpoints as a run writes them, in one go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lora_moe_rl.files import checkpoint_writing
from lora_moe_rl.files.checkpoint_writing import prune


@contextmanager
def write_checkpoint(
    root: Path, step: int, keep: int, metadata: dict[str, Any], written=None, **more
) -> Iterator[Path]:
    """Yields the directory to write files into. Only `keep` and those of `also` stay after it."""
    with checkpoint_writing.write_checkpoint(root, step, metadata, written) as directory:
        yield directory
    prune(root, step, keep, **more)
