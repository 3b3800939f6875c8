"""A store: tensors in one file that every process maps read-only, and nobody can write.

    FOLDER/base.bin   tensors, each from a multiple of 4,096 bytes on
    FOLDER/base.json  what they are and of what, written last: without it the store is not there
    FOLDER/writing    locked by who writes it: others wait, and one that dies lets go
    FOLDER/users      locked, shared, by all who have it, as long as they live

Whoever needs it first writes it. The description is compared, and where tensors lie follows from
what they are. It has a checksum of each tensor's bytes, which every process verifies in what it has
mapped before it uses the tensor. Pages of the file are in memory once, however many map them.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch

from lora_moe_rl.adapters.sharding import Box, window
from lora_moe_rl.base.contents import Contents, Kept, differing
from lora_moe_rl.base.room import check_room, no_room
from lora_moe_rl.base.same import checksum
from lora_moe_rl.errors import HeldBaseError

BIN, DESCRIPTION, WRITING, USERS = "base.bin", "base.json", "writing", "users"
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
Fill = Callable[[str, torch.Tensor], None]


class Written(NamedTuple):
    """What the description says that only who wrote the store could know."""

    source: str  # the state of the files that it was read from
    checksums: Mapping[str, str]


class Store:
    """Tensors by name: views of one mapping, of which a write ends the process (SIGSEGV)."""

    def __init__(
        self,
        folder: Path | str,
        contents: Contents,
        written: Written,
        memory: mmap.mmap,
        users: int,
    ):
        self.contents, self.source = contents, written.source
        self._folder, self._memory = folder, memory
        self._users = users  # open as long as the process lives: leftovers are known by it
        self._places = contents.places
        self._unverified = dict(written.checksums)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Raises HeldBaseError, the first time, for bytes that are not those that were written."""
        kept, place = self.contents.tensors[name], self._places[name]
        if name in self._unverified:
            if checksum(self._memory, place, kept.nbytes) != self._unverified[name]:
                raise HeldBaseError(
                    f"{self._folder}/{BIN}: {name} is not what was written there, by its checksum: "
                    "the file was changed; remove the folder and start the run anew"
                )
            del self._unverified[name]
        return _view(self._memory, kept, place)

    def part(self, name: str, box: Box) -> torch.Tensor:
        """A view."""
        return self[name][window(box.start, box.shape)]


def open_store(folder: Path | str, contents: Contents, fill: Fill, source: str = "") -> Store:
    """The store of `folder`, written first if nobody has: `fill(name, tensor)` for each. `source`:
    the state of the files that `fill` reads, kept beside. Raises HeldBaseError when there is none
    and no room for one, and for one that is of something else or damaged."""
    with _opened(folder) as directory:
        users = _lock(directory, USERS, fcntl.LOCK_SH)
        try:
            _write_once(folder, directory, contents, fill, source)
            written = _check(folder, directory, contents)
            memory = _map(folder, directory, contents.nbytes)
            return Store(folder, contents, written, memory, users)
        except BaseException:
            os.close(users)
            raise


def in_use(folder: Path | str) -> bool:
    """Whether a process that lives has the store, or is about to."""
    with _opened(folder) as directory:
        if USERS not in os.listdir(directory):
            return True  # being made
        try:
            os.close(_lock(directory, USERS, fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            return True
    return False


def keep(folder: Path | str) -> int:
    """A descriptor that says, until it is closed, that the store is in use."""
    with _opened(folder) as directory:
        return _lock(directory, USERS, fcntl.LOCK_SH)


@contextmanager
def _opened(folder: Path | str) -> Iterator[int]:
    """A descriptor of the folder, by which names lead nowhere else. Raises HeldBaseError for a
    folder that is not there, or into which others may write."""
    try:
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise HeldBaseError(
            f"{folder} cannot be opened ({error.strerror}): the run that held its base there has "
            "ended, or trainer and engines are on several machines; set model.held_once=off"
        ) from error
    try:
        found = os.fstat(directory)
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HeldBaseError(f"{folder} is another user's, or others may write into it")
        yield directory
    finally:
        os.close(directory)


def _lock(directory: int, name: str, how: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _write_once(
    folder: Path | str, directory: int, contents: Contents, fill: Fill, source: str
) -> None:
    """Unless it is there; waits for one who is writing it."""
    writing = _lock(directory, WRITING, fcntl.LOCK_EX)
    try:
        if not _published(directory):
            checksums = _write(folder, directory, contents, fill)
            _publish(directory, contents, Written(source, checksums))
    finally:
        os.close(writing)


def _published(directory: int) -> bool:
    try:
        os.stat(DESCRIPTION, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _write(folder: Path | str, directory: int, contents: Contents, fill: Fill) -> dict[str, str]:
    """All tensors; returns their checksums."""
    for name in (BIN, DESCRIPTION + ".tmp"):  # of one that died over it
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
    check_room(Path(folder).parent, contents.nbytes)
    descriptor = os.open(BIN, NEW, 0o600, dir_fd=directory)
    try:
        try:
            # To run out of room while writing to a mapping would kill the process.
            os.posix_fallocate(descriptor, 0, contents.nbytes)
        except OSError as error:
            raise HeldBaseError(no_room(Path(folder).parent, contents.nbytes)) from error
        checksums = _fill(mmap.mmap(descriptor, contents.nbytes), contents, fill)
        os.fchmod(descriptor, 0o400)
        os.fsync(descriptor)
        return checksums
    finally:
        os.close(descriptor)


def _publish(directory: int, contents: Contents, written: Written) -> None:
    text = json.dumps(contents.described() | written._asdict(), indent=1).encode()
    descriptor = os.open(DESCRIPTION + ".tmp", NEW, 0o400, dir_fd=directory)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(DESCRIPTION + ".tmp", DESCRIPTION, src_dir_fd=directory, dst_dir_fd=directory)


def _fill(memory: mmap.mmap, contents: Contents, fill: Fill) -> dict[str, str]:
    checksums = {}
    for name, offset in contents.places.items():
        kept = contents.tensors[name]
        fill(name, _view(memory, kept, offset))
        checksums[name] = checksum(memory, offset, kept.nbytes)
    return checksums


def _check(folder: Path | str, directory: int, contents: Contents) -> Written:
    """What its writer left. Raises HeldBaseError, naming what differs, for a store of something
    else."""
    descriptor = os.open(DESCRIPTION, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    with os.fdopen(descriptor, "rb") as file:
        try:
            found = json.loads(file.read())
            unlike = list(differing(found, contents.described()))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise HeldBaseError(f"{folder}/{DESCRIPTION} is damaged: {error!r}") from error
    if unlike:
        raise HeldBaseError(
            f"{folder} holds the base of something else: {'; '.join(unlike[:4])}. Start the run "
            "anew, or set model.held_once=off"
        )
    source, checksums = found.get("source"), found.get("checksums")
    if not (
        isinstance(source, str)
        and isinstance(checksums, dict)
        and checksums.keys() == contents.tensors.keys()
    ):
        raise HeldBaseError(f"{folder}/{DESCRIPTION} is damaged: it lacks checksums of tensors")
    return Written(source, checksums)


def _map(folder: Path | str, directory: int, nbytes: int) -> mmap.mmap:
    try:
        descriptor = os.open(BIN, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    except OSError as error:
        raise HeldBaseError(f"{folder}/{BIN} cannot be opened: {error.strerror}") from error
    try:
        if (size := os.fstat(descriptor).st_size) != nbytes:
            raise HeldBaseError(
                f"{folder}/{BIN} has {size:,} bytes instead of {nbytes:,}: it is truncated, or "
                "another's; remove the folder and start the run anew"
            )
        return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)


def _view(memory: mmap.mmap, kept: Kept, offset: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that cannot be written, which is the point
        flat = torch.frombuffer(
            memory, dtype=getattr(torch, kept.dtype), count=math.prod(kept.shape), offset=offset
        )
    return flat.view(kept.shape)
