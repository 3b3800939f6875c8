"""The PEFT directory that a command writes: whole, or none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_moe_rl.errors import ExportError


@contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """What the disk refuses of `adapters.peft.write`, which then leaves nothing, becomes an
    ExportError."""
    try:
        yield
    except OSError as error:
        raise ExportError(
            f"cannot write {out}: {error.strerror or error}; nothing was left there. Free some "
            "space, or name a directory on another disk"
        ) from error
