"""A buffer that two processes of one machine share: a file in memory, mapped by both.

`multiprocessing.shared_memory` is not used: until Python 3.13 each process that opens a block also
claims to own it, and its exit removes the block under the others.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from lora_moe_rl.errors import RefitError

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def shared_buffer(nbytes: int) -> Iterator[tuple[str, np.ndarray]]:
    """(path, uint8 `[nbytes]`) of a new buffer, removed on exit. Raises RefitError when full."""
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    descriptor, path = tempfile.mkstemp(prefix="lora_moe_rl-", dir=folder)
    try:
        try:
            # Reserved now: writing to a mapped file that cannot grow would kill the process.
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            raise RefitError(
                f"no room for an adapter of {nbytes} bytes in {folder}: {error.strerror}; enlarge "
                f"it (docker: --shm-size)"
            ) from error
        # Not closed by hand: the map lives as long as the last array that views it.
        yield path, np.frombuffer(mmap.mmap(descriptor, nbytes), dtype=np.uint8)
    finally:
        os.close(descriptor)
        os.unlink(path)


def read_shared(path: str, nbytes: int) -> np.ndarray:
    """A private copy of a shared buffer, uint8 `[nbytes]`."""
    return np.fromfile(path, dtype=np.uint8, count=nbytes)
