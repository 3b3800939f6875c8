"""Files and directories that are replaced as a whole: a name always stands for the old one or the
new, and what is new is on the disk once the call returns, also if the machine stops then.

Nothing that is replaced is replaced at each step. What grows with each step is appended to, and is
on the disk with the next checkpoint (`RunDir.sync`): a run that goes on keeps no more of it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def replace_file(path: Path, content: bytes) -> None:
    """Writes `path` whole or not at all: of what a full disk has not taken nothing stays there."""
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        with open(scratch, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """Yields an empty directory, which takes the place of `directory` on leaving; nothing happens
    when the body raises. For one level of files.

    Where the file system cannot exchange two names at once (NFS), a kill between two renames
    leaves the old directory as `.NAME.lora_moe_rl.old` alone; the next write puts it back first.
    One process at a time may write a directory.
    """
    directory = Path(os.path.realpath(directory))  # a link stays one
    # Names that nobody else gives: what has them is left of a write that was killed, and goes.
    fresh, old = (
        directory.with_name(f".{directory.name}.lora_moe_rl.{end}") for end in ("tmp", "old")
    )
    _put_back(directory, old)
    _remove(fresh, old)
    fresh.mkdir(parents=True)
    try:
        yield fresh
        for path in [*fresh.iterdir(), fresh]:
            sync(path)
        put_in_place(fresh, directory, old)
    except Exception:
        _put_back(directory, old)
        _remove(fresh)
        raise
    _remove(fresh, old)


def put_in_place(fresh: Path, directory: Path, old: Path) -> None:
    """Gives `fresh`, whose files are on the disk, the name of `directory`. What had it before is
    then under the name `fresh` or `old`."""
    if not directory.exists():
        os.rename(fresh, directory)
    elif not _exchange(fresh, directory):
        os.rename(directory, old)
        os.rename(fresh, directory)
    sync(directory.parent)


def _put_back(directory: Path, old: Path) -> None:
    if old.exists() and not directory.exists():
        os.rename(old, directory)


def sync(path: Path) -> None:
    """What a file or a directory holds is on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Puts each of two directories under the other's name, at once. Returns False when the file
    system cannot."""
    rename = ctypes.CDLL(None).renameat2
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0


def _remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
