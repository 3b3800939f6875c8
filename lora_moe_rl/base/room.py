"""Room for a base that is held in a file."""

from __future__ import annotations

import os
from pathlib import Path

from lora_moe_rl.errors import HeldBaseError

GIB = 2**30


def check_room(directory: Path, nbytes: int) -> None:
    """Raises HeldBaseError when the file system of `directory` has no room for so much."""
    try:
        system = os.statvfs(directory)
    except OSError as error:
        raise HeldBaseError(f"model.held_dir={directory}: {error.strerror}") from error
    if system.f_bavail * system.f_frsize < nbytes:
        raise HeldBaseError(no_room(directory, nbytes))


def no_room(directory: Path, nbytes: int) -> str:
    system = os.statvfs(directory)
    free = system.f_bavail * system.f_frsize
    return (
        f"model.held_dir={directory} has room for {free / GIB:.2f} GiB, and the base that is to "
        f"be held there takes {nbytes / GIB:.2f} GiB: give it more (a container: --shm-size; "
        "else mount -o remount,size=), or set model.held_dir to a directory on a disk, whose pages "
        "are in memory once as well and can be dropped"
    )
