"""CUDA IPC on one machine: the worker maps the sender's memory on its GPU.

A part is packed on the trainer rank's GPU, stays there, and is copied from there into slots: within
a GPU, or from one to another of the machine. `SentPart.path` is what opens the memory, as JSON
(`base/ipc.py`). The memory goes with the trainer rank's process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import torch

from lora_moe_rl.base.ipc import Cuda, Port
from lora_moe_rl.errors import NotShared, RefitError
from lora_moe_rl.refit import transports
from lora_moe_rl.refit.parts import PartLayout, SentPart


class Channel(transports.Channel):
    port: Port = Cuda()

    @staticmethod
    def unfit(places: Sequence[str]) -> str | None:
        if len(set(places)) == 1:
            return None
        return (
            "needs all trainer ranks and engines on the GPUs of one machine, in one container and "
            "as one user, and they are not; use distributed or directory"
        )

    def outgoing(self, layout: PartLayout, host: str) -> Outgoing:
        return Outgoing(self.port)

    def incoming(self, rank: int) -> Incoming:
        return Incoming(self.port)


class Outgoing:
    """A trainer rank's memory, and what opens it."""

    def __init__(self, port: Port):
        self.port = port

    def memory(self, nbytes: int, device: torch.device) -> torch.Tensor:
        try:
            buffer = self.port.empty(nbytes).zero_()  # what is between boxes is looked at too
            self.told = json.dumps(self.port.share(buffer))
        except NotShared as error:
            raise RefitError(f"refit.transport=cuda_ipc: {error}; or use shm") from error
        except torch.OutOfMemoryError as error:
            raise RefitError(
                f"no room on the GPU for {nbytes:,} bytes of an adapter that "
                "refit.transport=cuda_ipc keeps there; use shm, or lower "
                "trainer.micro_batch_tokens"
            ) from error
        return buffer

    def offer(self, sent: SentPart) -> SentPart:
        return replace(sent, path=self.told)


class Incoming:
    """Maps each sender's memory once."""

    def __init__(self, port: Port):
        self.port = port
        self.mapped: dict[int, tuple[str, torch.Tensor]] = {}

    def open(self, layout: PartLayout, sent: SentPart) -> torch.Tensor:
        if self.mapped.get(sent.source, (None,))[0] != sent.path:
            self.mapped.pop(sent.source, None)  # of a trainer rank that has ended
            self.mapped[sent.source] = (sent.path, self._open(sent))
        return self.mapped[sent.source][1]

    def _open(self, sent: SentPart) -> torch.Tensor:
        whose = f"adapter version {sent.version} of trainer rank {sent.source}"
        try:
            memory = self.port.open(json.loads(sent.path))
        except (NotShared, ValueError, KeyError, TypeError) as error:
            raise RefitError(f"{whose} on its GPU cannot be read: {error}") from error
        if memory.nbytes != sent.nbytes:
            raise RefitError(f"{whose}: {memory.nbytes} bytes instead of {sent.nbytes}")
        return memory
