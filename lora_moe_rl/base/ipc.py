"""A tensor's memory on a GPU, told to another process in JSON: nothing is pickled.

`torch.UntypedStorage._share_cuda_` asks the driver for a handle (`cudaIpcGetMemHandle`) of the
allocation that the storage lies in, and `_new_shared_cuda` opens it, as torch.multiprocessing does
(`torch/multiprocessing/reductions.py`). Who shares keeps the tensor as long as others read it. Not
shareable so: memory of torch's expandable segments, and of vLLM's pools that sleep.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Protocol

import torch

from lora_moe_rl.base.room import expandable_segments
from lora_moe_rl.errors import NotShared

HANDLES = ("handle", "counter", "event")  # bytes, as base64
SIZES = ("nbytes", "offset", "counter_offset")


class Port(Protocol):
    """How memory goes from one process to another."""

    def device(self) -> str:
        """What both ends must be on; the same for all processes."""
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8 `[nbytes]` that can be shared. Raises NotShared."""
        ...

    def share(self, memory: torch.Tensor) -> dict[str, Any]:
        """What `open` takes, as JSON."""
        ...

    def open(self, told: dict[str, Any]) -> torch.Tensor:
        """uint8 `[nbytes]`, the same memory. Raises NotShared when it is no longer there."""
        ...


class Cuda:
    """The current GPU of this process."""

    def device(self) -> str:
        index = torch.cuda.current_device()
        return str(torch.cuda.get_device_properties(index).uuid)

    def empty(self, nbytes: int) -> torch.Tensor:
        if not torch.cuda.is_available():
            raise NotShared("this process has no GPU")
        if name := expandable_segments():
            raise NotShared(
                f"{name} has expandable_segments:True, whose memory cannot be shared: take it out"
            )
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def share(self, memory: torch.Tensor) -> dict[str, Any]:
        # Only this stream has written; what others read must stand there.
        torch.cuda.current_stream().synchronize()
        storage = memory.untyped_storage()
        _, handle, nbytes, offset, counter, counter_offset, event, sync = storage._share_cuda_()
        handles = (base64.b64encode(one).decode() for one in (handle, counter, event))
        told = dict(zip(HANDLES, handles, strict=True))
        sizes = (nbytes, offset, counter_offset)
        return told | dict(zip(SIZES, sizes, strict=True)) | {"sync": sync}

    def open(self, told: dict[str, Any]) -> torch.Tensor:
        handle, counter, event = handles_of(told)
        nbytes, offset, counter_offset = (int(told[name]) for name in SIZES)
        if not torch.cuda.is_available():
            raise NotShared("this process has no GPU")
        index = torch.cuda.current_device()  # the same GPU may have another number there
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                index, handle, nbytes, offset, counter, counter_offset, event, bool(told["sync"])
            )
        except RuntimeError as error:
            raise NotShared(
                f"memory of another process cannot be opened ({error}): the process has ended, or "
                "is in another container without its ipc namespace"
            ) from error
        return torch.empty(0, dtype=torch.uint8, device=f"cuda:{index}").set_(storage)


def handles_of(told: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    """Raises NotShared for what is no base64."""
    try:
        handle, counter, event = (base64.b64decode(told[n], validate=True) for n in HANDLES)
    except (KeyError, TypeError, binascii.Error) as error:
        raise NotShared(f"a handle of memory on a GPU is damaged: {error!r}") from error
    return handle, counter, event
