"""How the bytes of boxes get between the host's memory and a trainer rank's or a worker's device.

On a GPU copies are begun one after the other: into slots they are waited for once, at the end of a
version. Only those from and to page-locked memory go on by themselves: of other memory the driver
makes a copy of its own, while the caller waits.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from lora_moe_rl.errors import RefitError

Writer = Callable[[np.ndarray], None]  # takes the bytes of a box


class Port(Protocol):
    """What senders and receivers ask of the device that adapters or slots are on."""

    apart: bool  # whether the host cannot read and write its memory

    def lock(self, memory: np.ndarray) -> None:
        """Page-locks it, so that copies from and to it need nobody. Raises RefitError."""
        ...

    def unlock(self, memory: np.ndarray) -> None: ...

    def writer(self, held: torch.Tensor, shape: tuple[int, ...]) -> Writer:
        """Begins to write a box of `shape` into `held`, of that shape or one that it is broadcast
        to. The bytes must stay as they are until `wait`."""
        ...

    def wait(self) -> None:
        """Until all that was begun is done."""
        ...

    def fetch(self, to: np.ndarray, values: torch.Tensor) -> Callable[[], None]:
        """Begins to copy bytes of the device into the host's memory; returns what waits until they
        are there."""
        ...


class Host:
    """The host's own memory: what has begun is done."""

    apart = False

    def lock(self, memory: np.ndarray) -> None:
        pass

    def unlock(self, memory: np.ndarray) -> None:
        pass

    def writer(self, held: torch.Tensor, shape: tuple[int, ...]) -> Writer:
        if held.is_contiguous() and held.shape == shape:
            flat = held.view(-1).view(torch.uint8).numpy()
            return functools.partial(np.copyto, flat)

        def write(data: np.ndarray) -> None:
            held.copy_(torch.from_numpy(data).view(held.dtype).view(shape))

        return write

    def wait(self) -> None:
        pass

    def fetch(self, to: np.ndarray, values: torch.Tensor) -> Callable[[], None]:
        np.copyto(to, values.numpy())
        return self.wait


class Cuda:
    """The current GPU. Copies are given to the current stream, as all else that is computed."""

    apart = True

    def lock(self, memory: np.ndarray) -> None:
        status = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)
        if int(status):
            raise RefitError(
                f"{memory.nbytes:,} bytes of an adapter cannot be page-locked (cudaHostRegister: "
                f"error {int(status)}): let the container lock memory (ulimit -l unlimited)"
            )

    def unlock(self, memory: np.ndarray) -> None:
        status = torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)
        if int(status):
            raise RefitError(f"cudaHostUnregister: error {int(status)}")

    def writer(self, held: torch.Tensor, shape: tuple[int, ...]) -> Writer:
        def write(data: np.ndarray) -> None:
            source = torch.from_numpy(data).view(held.dtype).view(shape)
            held.copy_(source, non_blocking=True)

        return write

    def wait(self) -> None:
        torch.cuda.current_stream().synchronize()

    def fetch(self, to: np.ndarray, values: torch.Tensor) -> Callable[[], None]:
        torch.from_numpy(to).copy_(values, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return done.synchronize


def port_of(device: torch.device) -> Port:
    return Cuda() if device.type == "cuda" else Host()


class Sources:
    """The memory that each trainer rank's part comes in. What is the same for two versions stays,
    and is page-locked from the second on; what is new each time is not worth it."""

    def __init__(self, port: Port):
        self.port = port
        self._last: dict[int, weakref.ref[np.ndarray]] = {}
        self._locked: dict[int, np.ndarray] = {}

    def locked(self, source: int, memory: np.ndarray) -> bool:
        """Whether the memory that a part of trainer rank `source` has come in is locked now."""
        locked = self._locked.get(source)
        if locked is not None and locked is not memory:
            self.port.wait()  # nothing reads it any more
            self.port.unlock(self._locked.pop(source))
        last = self._last.get(source)
        if locked is not memory and last is not None and last() is memory:
            self.port.lock(memory)
            self._locked[source] = memory
        self._last[source] = weakref.ref(memory)
        return source in self._locked
