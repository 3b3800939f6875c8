"""A store in the memory of a GPU: the engine's rank there owns it, the trainer rank there maps it.

    FOLDER/GPU/ipc.json   what the tensors are and of what, which part of each is there, their
                          handles and checksums, written last
    FOLDER/GPU/owner      locked by the engine's process as long as it lives

Each GPU has its own, with the part of the engine's rank that stands on it, whichever that is: a
trainer rank looks for the store of its own GPU, and takes nothing that is not there. The memory is
gone with its owner, unlike a file's: an engine that starts anew makes another, and who has mapped
the old one is refused (`Mapped.check`). A GPU has no read-only mappings: `Mapped.check` also sums
up a few tensors, others each time, so that a write is found, if not prevented.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.base.contents import Contents, Element, Kept, Shape, differing
from lora_moe_rl.base.ipc import Port
from lora_moe_rl.base.parts import told as in_words
from lora_moe_rl.base.parts import whole
from lora_moe_rl.base.store import Fill
from lora_moe_rl.errors import HeldBaseError, NotShared
from lora_moe_rl.files.replacing import replace_file
from lora_moe_rl.kernels.bit_sums import bit_sum

DESCRIPTION, OWNER = "ipc.json", "owner"
WATCHED = 2  # tensors that a check sums up


@dataclass(eq=False)
class OnGpu:
    """Parts of tensors, by name, in the memory of a GPU. `boxes`: which part of each."""

    contents: Contents
    boxes: Mapping[str, Box]
    tensors: dict[str, torch.Tensor]
    gpu: str

    def __getitem__(self, name: str) -> torch.Tensor:
        """All that is there of it."""
        return self.tensors[name]

    def part(self, name: str, box: Box) -> torch.Tensor:
        """A view. Raises HeldBaseError when not all of it is there."""
        held = self.boxes[name]
        if box.common(held) != box:
            shape = self.contents.tensors[name].shape
            raise HeldBaseError(
                f"{name}: this rank takes {in_words(box, shape)}, and GPU {self.gpu}, on which it "
                f"is, has {in_words(held, shape)}. The ranks of trainer and engine on a GPU must "
                "hold the same: give both the GPUs in one order, cut them alike (trainer.tp, "
                "trainer.ep and trainer.etp as rollout.tp with rollout.ep), or set "
                "model.held_once=off"
            )
        return self.tensors[name][box.within(held)]


@dataclass(eq=False)
class Owned(OnGpu):
    """A store in memory that this process owns and others map."""

    lock: int

    def close(self) -> None:
        """Others are refused from here on."""
        self.tensors.clear()
        os.close(self.lock)


class Mapped(OnGpu):
    """A store in memory that another process owns."""

    def __init__(self, folder: Path, contents: Contents, told: dict[str, Any], port: Port):
        boxes = {
            name: _box(told["parts"][name], kept.shape) for name, kept in contents.tensors.items()
        }
        tensors = {
            name: _view(port.open(told["memory"][name]), kept.dtype, boxes[name].shape)
            for name, kept in contents.tensors.items()
        }
        super().__init__(contents, boxes, tensors, told["device"])
        self._folder, self._turn = folder, 0
        self._generation, self._sums = told["generation"], told["sums"]
        for name in contents.tensors:
            self._verify(name)

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
        if checksum(self.tensors[name]) != self._sums[name]:
            raise HeldBaseError(
                f"{name} is not what the engine has put there: somebody has written to the base, "
                "which is frozen; start the run anew, and with model.held_once=off if it happens "
                "again"
            )


def share_store(
    folder: Path | str, contents: Contents, boxes: Mapping[str, Box], fill: Fill, port: Port
) -> Owned:
    """Allocates and fills the part of every tensor in this process, and tells others. Raises
    HeldBaseError when a process that lives has done so on this GPU before."""
    gpu = port.device()
    place = Path(folder) / gpu
    lock = _lock(place)
    try:
        (place / DESCRIPTION).unlink(missing_ok=True)  # of an owner that has died
        tensors, memory = {}, {}
        for name, kept in contents.tensors.items():
            shape = boxes[name].shape
            with _not_shared():
                flat = port.empty(Kept(kept.dtype, shape).nbytes)
            tensors[name] = _view(flat, kept.dtype, shape)
            fill(name, tensors[name])
            memory[name] = port.share(flat)
        told = contents.described() | {
            "generation": os.urandom(16).hex(),
            "device": gpu,
            "parts": {name: _told(boxes[name]) for name in tensors},
            "memory": memory,
            "sums": {name: checksum(tensor) for name, tensor in tensors.items()},
        }
        replace_file(place / DESCRIPTION, json.dumps(told, indent=1).encode())
    except BaseException:
        os.close(lock)
        raise
    return Owned(contents, boxes, tensors, gpu, lock)


def map_store(folder: Path | str, contents: Contents, port: Port) -> Mapped:
    """What the engine's rank on this GPU has shared. Raises HeldBaseError, naming what differs, for
    memory of something else or on another GPU, for a damaged description, and when no engine that
    lives has any."""
    gpu = port.device()
    place = Path(folder) / gpu
    if not _owned(place):
        others = sorted(one.name for one in Path(folder).glob("*") if _owned(one))
        raise HeldBaseError(
            f"{place}: no engine holds the base there, on the GPU of this rank (GPUs on which one "
            f"does: {', '.join(others) or 'none'}); it has ended, or has not started, or stands on "
            "other GPUs than the trainer"
        )
    told = _read(place)
    try:
        unlike = list(differing(told, contents.described()))
        if told["device"] != gpu:
            unlike.append(f"it is on {told['device']} there and on {gpu} here")
    except (KeyError, TypeError, AttributeError) as error:
        raise HeldBaseError(f"{place / DESCRIPTION} is damaged: {error!r}") from error
    if unlike:
        raise HeldBaseError(
            f"{place} holds the base of something else: {'; '.join(unlike[:4])}. Start the run "
            "anew, or set model.held_once=off"
        )
    with _damage(place), _not_shared():
        return Mapped(place, contents, told, port)


def _lock(place: Path) -> int:
    """The lock of a GPU's owner. Raises HeldBaseError when a process that lives has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        place.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(place / OWNER, flags, 0o600)
    except OSError as error:
        raise HeldBaseError(
            f"{place}: {error.strerror}; the run that was to hold its base there has ended"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise HeldBaseError(
            f"{place}: another engine holds the base on this GPU already; one engine can"
        ) from error
    return lock


def _told(box: Box) -> list[list[int]]:
    """A part as [first, end) of each dimension."""
    return [[start, start + size] for start, size in zip(box.start, box.shape, strict=True)]


def _box(ranges: Any, shape: Shape) -> Box:
    """What was told. Raises ValueError or TypeError for no part of a tensor of `shape`."""
    start, end = ([int(ends[i]) for ends in ranges] for i in (0, 1))
    box = Box(tuple(start), tuple(b - a for a, b in zip(start, end, strict=True)))
    if len(start) != len(shape) or box.common(whole(shape)) != box:
        raise ValueError(f"{ranges} is no part of {list(shape)}")
    return box


def checksum(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bits, below 2^64."""
    return bit_sum(tensor).item() % 2**64


@contextmanager
def _damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise HeldBaseError(f"{folder / DESCRIPTION} is damaged: {error!r}") from error


@contextmanager
def _not_shared() -> Iterator[None]:
    try:
        yield
    except NotShared as error:
        raise HeldBaseError(f"{error}; or set model.held_once=off") from error


def _view(flat: torch.Tensor, dtype: Element, shape: Shape) -> torch.Tensor:
    """Raises ValueError for memory of another size."""
    if flat.nbytes != (wanted := Kept(dtype, shape).nbytes):
        raise ValueError(f"{flat.nbytes} bytes of memory for a tensor of {wanted}")
    return flat.view(getattr(torch, dtype)).view(shape)


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
