"""A directory as it is now, held while others replace it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def link(source: Path, target: Path, copies: bool = True) -> None:
    """The files of `source` in `target`, as hard links; where the file system has none, as copies,
    if they are wanted. Raises OSError when the disk refuses."""
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place)
            except OSError:
                if not copies:
                    raise
                shutil.copy2(path, place)


@contextmanager
def held(source: Path, folder: Path) -> Iterator[Path]:
    """Yields `source` by hard links in `folder`, under its own name: inside, who removes it takes
    nothing away. `folder` is nobody else's. Where there can be none, `source` itself."""
    there = folder / source.name
    made = not folder.parent.exists()
    shutil.rmtree(folder, ignore_errors=True)  # of one that was killed
    try:
        link(source, there, copies=False)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        there = source
    try:
        yield there
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            if made:
                folder.parent.rmdir()
