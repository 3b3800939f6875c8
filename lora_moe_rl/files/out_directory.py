"""Where a command writes: a directory that is new or empty."""

from __future__ import annotations

from pathlib import Path

from lora_moe_rl.errors import FileError


def require_empty(out: Path) -> None:
    """Raises FileError for a directory that holds something, for what is no directory, and for the
    one that the command runs in, which cannot be replaced by a finished one."""
    if out.resolve() == Path.cwd():
        raise FileError(f"--out {out} is the directory you are in; name a new one, such as ./out")
    if out.exists() and not out.is_dir():
        raise FileError(f"--out {out} is no directory")
    if out.is_dir() and any(out.iterdir()):
        raise FileError(f"--out {out} is not empty; name a new directory, or empty it")
