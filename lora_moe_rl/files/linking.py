"""A directory as it is now, held while others replace it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link(source: Path, target: Path) -> None:
    """The files of `source` in `target`, as hard links; copies where the file system has none.
    Raises OSError when the disk refuses."""
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(path, place)
            except OSError:
                shutil.copy2(path, place)
