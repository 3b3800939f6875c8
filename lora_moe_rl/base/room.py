"""Room for a base that is held in a file; memory of a GPU that no other process can have."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lora_moe_rl.errors import HeldBaseError

GIB = 2**30
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # as torch reads them


def expandable_segments() -> str:
    """The variable that makes torch allocate memory of a GPU that no other process can map; ''
    where none does."""
    for name in ALLOCATOR:
        if re.search(r"expandable_segments\s*:\s*True", os.environ.get(name, "")):
            return name
    return ""


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
