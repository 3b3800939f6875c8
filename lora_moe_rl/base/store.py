"""A store: tensors in one file that every process maps read-only, and nobody can write.

    FOLDER/base.bin   tensors, each from a multiple of 4,096 bytes on
    FOLDER/base.json  what they are and of what, written last: without it the store is not there
    FOLDER/writing    locked by who writes it: others wait, and one that dies lets go
    FOLDER/users      locked, shared, by all who have it, as long as they live

Whoever needs it first writes it. The description is no more than compared: where tensors lie
follows from what they are. Pages of the file are in memory once, however many map them.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from lora_moe_rl.base.room import check_room, no_room
from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.rollout.facts import Dtype

ALIGNMENT = 4096
FORMAT = 2
BIN, DESCRIPTION, WRITING, USERS = "base.bin", "base.json", "writing", "users"
Shape = tuple[int, ...]
Element = Dtype | Literal["int32", "float8_e4m3fn", "uint8"]
Fill = Callable[[str, torch.Tensor], None]


class Kept(NamedTuple):
    """A tensor of a store."""

    dtype: Element
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Contents:
    """What a store holds: `key` says of what, and under which conditions it is read."""

    key: Mapping[str, str]
    tensors: Mapping[str, Kept]

    @property
    def places(self) -> dict[str, int]:
        """The first byte of each tensor."""
        found, offset = {}, 0
        for name, tensor in self.tensors.items():
            found[name] = offset
            offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        return found

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        *_, last = self.places
        end = self.places[last] + self.tensors[last].nbytes
        return -(-end // ALIGNMENT) * ALIGNMENT

    def described(self) -> dict[str, Any]:
        places = self.places
        return {
            "format": FORMAT,
            "key": dict(self.key),
            "bytes": self.nbytes,
            "tensors": {
                name: {"offset": places[name], "dtype": tensor.dtype, "shape": list(tensor.shape)}
                for name, tensor in self.tensors.items()
            },
        }


class Store:
    """Tensors by name: views of one mapping, of which a write ends the process (SIGSEGV)."""

    def __init__(self, contents: Contents, memory: mmap.mmap, users: int):
        self.contents, self._memory = contents, memory
        self._users = users  # open as long as the process lives: leftovers are known by it
        self._places = contents.places

    def __getitem__(self, name: str) -> torch.Tensor:
        return _view(self._memory, self.contents.tensors[name], self._places[name])


def open_store(folder: Path | str, contents: Contents, fill: Fill) -> Store:
    """The store of `folder`, written first if nobody has: `fill(name, tensor)` for each. Raises
    HeldBaseError when there is none and no room for one, and for one that is of something else or
    damaged."""
    with _opened(folder) as directory:
        users = _lock(directory, USERS, fcntl.LOCK_SH)
        try:
            _write_once(folder, directory, contents, fill)
            _check(folder, directory, contents)
            return Store(contents, _map(folder, directory, contents.nbytes), users)
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


def _write_once(folder: Path | str, directory: int, contents: Contents, fill: Fill) -> None:
    """Unless it is there; waits for one who is writing it."""
    writing = _lock(directory, WRITING, fcntl.LOCK_EX)
    try:
        if not _published(directory):
            _write(folder, directory, contents, fill)
    finally:
        os.close(writing)


def _published(directory: int) -> bool:
    try:
        os.stat(DESCRIPTION, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _write(folder: Path | str, directory: int, contents: Contents, fill: Fill) -> None:
    """All tensors, then the description."""
    for name in (BIN, DESCRIPTION + ".tmp"):  # of one that died over it
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
    check_room(Path(folder).parent, contents.nbytes)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(BIN, flags, 0o600, dir_fd=directory)
    try:
        try:
            # To run out of room while writing to a mapping would kill the process.
            os.posix_fallocate(descriptor, 0, contents.nbytes)
        except OSError as error:
            raise HeldBaseError(no_room(Path(folder).parent, contents.nbytes)) from error
        _fill(mmap.mmap(descriptor, contents.nbytes), contents, fill)
        os.fchmod(descriptor, 0o400)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    text = json.dumps(contents.described(), indent=1).encode()
    descriptor = os.open(DESCRIPTION + ".tmp", flags, 0o400, dir_fd=directory)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(DESCRIPTION + ".tmp", DESCRIPTION, src_dir_fd=directory, dst_dir_fd=directory)


def _fill(memory: mmap.mmap, contents: Contents, fill: Fill) -> None:
    for name, offset in contents.places.items():
        fill(name, _view(memory, contents.tensors[name], offset))


def _check(folder: Path | str, directory: int, contents: Contents) -> None:
    """Raises HeldBaseError, naming what differs, for a store of something else."""
    descriptor = os.open(DESCRIPTION, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory)
    with os.fdopen(descriptor, "rb") as file:
        try:
            found = json.loads(file.read())
            differing = list(_differing(found, contents.described()))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise HeldBaseError(f"{folder}/{DESCRIPTION} is damaged: {error!r}") from error
    if differing:
        raise HeldBaseError(
            f"{folder} holds the base of something else: {'; '.join(differing[:4])}. Start the run "
            "anew, or set model.held_once=off"
        )


def _differing(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    for name in sorted(found["key"].keys() | wanted["key"]):
        there, here = found["key"].get(name, "missing"), wanted["key"].get(name, "missing")
        if there != here:
            yield f"{name} is {there} there and {here} here"
    for name in ("format", "bytes"):
        if found.get(name) != wanted[name]:
            yield f"{name} is {found.get(name)} there and {wanted[name]} here"
    there, here = found.get("tensors", {}), wanted["tensors"]
    for name in sorted(there.keys() | here):
        if there.get(name) != here.get(name):
            yield f"{name} is {there.get(name)} there and {here.get(name)} here"


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
