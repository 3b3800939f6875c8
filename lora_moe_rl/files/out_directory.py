"""Where a command writes: a directory that is new or empty, or a file. What can be said of a place
is said before anything slow."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lora_moe_rl.errors import FileError
from lora_moe_rl.files.checkpoint import MANIFEST, is_named


def require_empty(out: Path) -> None:
    """Raises FileError for a directory that holds something, for what is no directory, and for the
    one that the command runs in, which cannot be replaced by a finished one."""
    if out.resolve() == Path.cwd():
        raise FileError(f"--out {out} is the directory you are in; name a new one, such as ./out")
    if out.exists() and not out.is_dir():
        raise FileError(f"--out {out} is no directory")
    if out.is_dir() and any(out.iterdir()):
        raise FileError(f"--out {out} is not empty; name a new directory, or empty it")
    require_place(out, f"--out {out}")


def require_file(path: Path, option: str) -> None:
    """Raises FileError for a file, given by `option`, that cannot be made or replaced."""
    if path.is_dir():
        raise FileError(f"{option} {path} is a directory; name a file in it")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise FileError(f"{option} {path}: there is no directory {folder}")
    require_place(folder, f"{option} {path}")


def require_place(path: Path, what: str) -> None:
    """Raises FileError where a directory cannot be made: what is there of its path is no directory,
    or cannot be written to; inside a checkpoint, which another file makes invalid; and where a run
    would take it for a checkpoint of its own. `what`: how the user gave it."""
    for one in (path.absolute(), *path.absolute().parents):
        if (one / MANIFEST).is_file():
            raise FileError(f"{what} lies in {one}, a checkpoint; name a place outside of it")
        if _taken_for_checkpoint(one):
            raise FileError(
                f"{what}: {one} would be taken for a checkpoint of the run {one.parents[1]}; name "
                "a place outside of its checkpoints"
            )
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise FileError(f"{what}: {there} is no directory")
    if not os.access(there, os.W_OK | os.X_OK) or not _takes_files(there):
        raise FileError(f"{what}: {there} cannot be written to")


def _takes_files(folder: Path) -> bool:
    """What is no disk (/proc, /sys) may let root in, and takes no file."""
    if os.statvfs(folder).f_blocks:
        return True
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _taken_for_checkpoint(path: Path) -> bool:
    """Whether a directory would pass for a checkpoint, by its name and its folder's, as
    `checkpoint.all_of` goes by. What holds something already is as it is: another tool's, or a
    run's own that is damaged."""
    if not is_named(path) or path.parent.name != "checkpoints":
        return False
    return not path.is_dir() or not any(path.iterdir())
