"""Who owns the held base: the run. It makes the folder at its start and removes it at its end.

Processes that have mapped the file keep it as long as they live, whoever removed its name. A run
that was killed leaves its folder behind; the next run with the same model.held_dir removes it,
once nobody has it any more.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lora_moe_rl.base.store import in_use, keep
from lora_moe_rl.errors import HeldBaseError

PREFIX = "lora_moe_rl-base-"


@contextmanager
def owned(directory: str) -> Iterator[str]:
    """A new folder in `directory` for a store, gone at the end. Raises HeldBaseError."""
    remove_left(Path(directory))
    try:
        folder = tempfile.mkdtemp(prefix=PREFIX, dir=directory)
    except OSError as error:
        raise HeldBaseError(f"model.held_dir={directory}: {error.strerror}") from error
    try:
        users = keep(folder)
        try:
            yield folder
        finally:
            os.close(users)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left(directory: Path) -> list[Path]:
    """Removes what runs that were killed have left, of this user; returns what it was."""
    left = []
    for folder in sorted(directory.glob(f"{PREFIX}*")):
        try:
            used = in_use(folder)
        except HeldBaseError:  # another user's, or no folder
            continue
        if not used:
            shutil.rmtree(folder, ignore_errors=True)
            left.append(folder)
    return left
