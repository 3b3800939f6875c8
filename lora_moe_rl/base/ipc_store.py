"""A store in the memory of a GPU: the engine's process owns it, a trainer rank maps it.

    FOLDER/ipc.json   what the tensors are and of what, their handles and checksums, written last
    FOLDER/owner      locked by the engine's process as long as it lives

The memory is gone with its owner, unlike a file's: an engine that starts anew makes another, and
who has mapped the old one is refused (`Mapped.check`). A GPU has no read-only mappings:
`Mapped.check` also sums up a few tensors, others each time, so that a write is found, if not
prevented.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lora_moe_rl.base.contents import Contents, Kept, differing
from lora_moe_rl.base.ipc import Port
from lora_moe_rl.base.store import Fill
from lora_moe_rl.errors import HeldBaseError, NotShared
from lora_moe_rl.files.replacing import replace_file
from lora_moe_rl.kernels.bit_sums import bit_sums

DESCRIPTION, OWNER = "ipc.json", "owner"
WATCHED = 2  # tensors that a check sums up


class Owned:
    """Tensors by name, in memory that this process has and others map."""

    def __init__(self, contents: Contents, tensors: dict[str, torch.Tensor], lock: int):
        self.contents, self._tensors, self._lock = contents, tensors, lock

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def close(self) -> None:
        """Others are refused from here on."""
        self._tensors.clear()
        os.close(self._lock)


class Mapped:
    """Tensors by name, in memory that another process has."""

    def __init__(self, folder: Path, contents: Contents, told: dict[str, Any], port: Port):
        self.contents, self._folder = contents, folder
        self._generation, self._sums = told["generation"], told["sums"]
        self._tensors = {
            name: _view(port.open(told["memory"][name]), kept)
            for name, kept in contents.tensors.items()
        }
        self._turn = 0
        for name in contents.tensors:
            self._verify(name)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def check(self) -> None:
        """Raises HeldBaseError when the owner has ended or another has taken its place, and when
        one of the WATCHED tensors whose turn it is has changed. All have their turn."""
        folder = self._folder
        if not _owned(folder) or _read(folder).get("generation") != self._generation:
            raise HeldBaseError(
                f"{folder}: the engine that holds the base has ended, and its memory with "
                "it: trainer ranks have to start anew"
            )
        names = list(self.contents.tensors)
        for i in range(min(WATCHED, len(names))):
            self._verify(names[(self._turn + i) % len(names)])
        self._turn = (self._turn + WATCHED) % len(names)

    def _verify(self, name: str) -> None:
        if sums(self._tensors[name]) != self._sums[name]:
            raise HeldBaseError(
                f"{name} is not what the engine has put there: somebody has written to the base, "
                "which is frozen; start the run anew, and with model.held_once=off if it happens "
                "again"
            )


def share_store(folder: Path | str, contents: Contents, fill: Fill, port: Port) -> Owned:
    """Allocates and fills every tensor in this process, and tells others. Raises HeldBaseError when
    a process that lives has done so before."""
    folder = Path(folder)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(folder / OWNER, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / DESCRIPTION).unlink(missing_ok=True)  # of an owner that has died
        tensors, memory = {}, {}
        for name, kept in contents.tensors.items():
            with _not_shared():
                flat = port.empty(kept.nbytes)
            tensors[name] = _view(flat, kept)
            fill(name, tensors[name])
            memory[name] = port.share(flat)
        told = contents.described() | {
            "generation": os.urandom(16).hex(),
            "device": port.device(),
            "memory": memory,
            "sums": {name: sums(tensor) for name, tensor in tensors.items()},
        }
        replace_file(folder / DESCRIPTION, json.dumps(told, indent=1).encode())
    except BlockingIOError as error:
        os.close(lock)
        raise HeldBaseError(
            f"{folder}: another engine holds the base on this GPU already; one engine can"
        ) from error
    except BaseException:
        os.close(lock)
        raise
    return Owned(contents, tensors, lock)


def map_store(folder: Path | str, contents: Contents, port: Port) -> Mapped:
    """What an engine has shared. Raises HeldBaseError, naming what differs, for memory of something
    else or on another GPU, for a damaged description, and when no engine that lives has any."""
    folder = Path(folder)
    if not _owned(folder):
        raise HeldBaseError(
            f"{folder}: no engine holds the base there; it has ended, or has not started"
        )
    told = _read(folder)
    try:
        unlike = list(differing(told, contents.described()))
        if told["device"] != port.device():
            unlike.append(f"it is on {told['device']} there and on {port.device()} here")
    except (KeyError, TypeError, AttributeError) as error:
        raise HeldBaseError(f"{folder / DESCRIPTION} is damaged: {error!r}") from error
    if unlike:
        raise HeldBaseError(
            f"{folder} holds the base of something else: {'; '.join(unlike[:4])}. Start the run "
            "anew, or set model.held_once=off"
        )
    with _damage(folder), _not_shared():
        return Mapped(folder, contents, told, port)


def sums(tensor: torch.Tensor) -> list[int]:
    """Of a tensor's bits, each below 2^64."""
    return [one % 2**64 for one in bit_sums(tensor).tolist()]


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise HeldBaseError(f"{folder / DESCRIPTION} is damaged: {error!r}") from error


@contextmanager
def _not_shared() -> Iterator[None]:
    try:
        yield
    except NotShared as error:
        raise HeldBaseError(f"{error}; or set model.held_once=off") from error


def _view(flat: torch.Tensor, kept: Kept) -> torch.Tensor:
    """Raises ValueError for memory of another size."""
    if flat.nbytes != kept.nbytes:
        raise ValueError(f"{flat.nbytes} bytes of memory for a tensor of {kept.nbytes}")
    return flat.view(getattr(torch, kept.dtype)).view(kept.shape)


def _read(folder: Path) -> dict[str, Any]:
    with _damage(folder):
        try:
            return dict(json.loads((folder / DESCRIPTION).read_bytes()))
        except OSError as error:
            raise HeldBaseError(
                f"{folder / DESCRIPTION}: {error.strerror}; the engine has not shared its base yet"
            ) from error


def _owned(folder: Path) -> bool:
    """Whether the process that owns the memory lives."""
    try:
        lock = os.open(folder / OWNER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
