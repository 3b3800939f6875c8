"""NIXL: a worker reads what it needs out of a trainer rank's memory, over RDMA, NVLink or TCP.

A part stays where it was packed, on the host or on a GPU, and its memory is registered once with
UCX, which finds the way: `SentPart.path` tells workers of both, as JSON. A read is the worker's
alone: a trainer rank does nothing for it, and does not notice a worker that is lost. Nor does it
see which version is asked for: bytes of another one have other checksums.

NIXL's Python class lets a thread of its own spin on one core as long as it lives; here are the
bindings below it, with a thread that sleeps until something comes.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lora_moe_rl.base.room import expandable_segments
from lora_moe_rl.errors import RefitError
from lora_moe_rl.refit import transports
from lora_moe_rl.refit.copies import port_of
from lora_moe_rl.refit.parts import PartLayout, SentPart, host_memory

if TYPE_CHECKING:
    from lora_moe_rl.refit.parts import Memory

PROGRESS_US = 10_000  # the longest sleep of NIXL's thread; it wakes when something comes
POLL_S = 2e-4
# UCX keeps the registration of memory that is gone, without bound unless it is told one; vLLM's
# connectors set the same (`vllm/distributed/nixl_utils.py`).
UNRELEASED = ("UCX_RCACHE_MAX_UNRELEASED", "1024")

# Reads that did not end in time may still write: their memory is never used again, nor freed.
ABANDONED: list[tuple[Agent, int, Memory]] = []

log = logging.getLogger(__name__)


class Channel(transports.Channel):
    one_part = True
    modules = ("nixl_cu13",)

    def outgoing(self, layout: PartLayout, host: str) -> Outgoing:
        return Outgoing()

    def incoming(self, rank: int) -> Incoming:
        return Incoming(rank, self.settings.timeout_s)


@dataclass(frozen=True)
class Told:
    """Where a part is: `agent`, NIXL's name and metadata of the process that has it."""

    agent: str
    metadata: str  # base64
    kind: str  # NIXL's: DRAM or VRAM
    address: int
    device: int
    tensor: bool  # whether it is memory of a device to sender and receiver

    @classmethod
    def read(cls, path: str) -> Told:
        """Raises ValueError or TypeError for what is none."""
        return cls(**json.loads(path))


class Outgoing:
    """A trainer rank's memory, registered, and what opens it."""

    def memory(self, nbytes: int, device: torch.device) -> Memory:
        self.agent = Agent()
        buffer = _on_gpu(nbytes, device) if device.type == "cuda" else host_memory(nbytes)
        self.agent.register(buffer)
        self.told = self.agent.tell(buffer)
        return buffer

    def offer(self, sent: SentPart) -> SentPart:
        return replace(sent, path=json.dumps(vars(self.told)))


class Incoming:
    """An engine worker's end. All parts come through one buffer, the largest part's size, one after
    the other: what `open` has returned is overwritten by the next."""

    def __init__(self, rank: int, timeout_s: float):
        self.rank, self.timeout_s, self.agent = rank, timeout_s, Agent()
        self.peers: dict[int, str] = {}  # NIXL's names of the trainer ranks
        self.room: Memory | None = None

    def open(self, layout: PartLayout, sent: SentPart) -> Memory:
        whose = f"adapter version {sent.version}: trainer rank {sent.source}"
        try:
            told = Told.read(sent.path)
        except (ValueError, TypeError) as error:
            raise RefitError(f"{whose} did not tell where its part is ({error})") from error
        memory = self._room(layout.nbytes, told.tensor)[: layout.nbytes]
        try:
            self._know(sent.source, told)
            self._read(told, memory, layout.runs(self.rank))
        except (*self.agent.errors, TimeoutError, ValueError) as error:
            self._forget(sent.source)
            raise RefitError(
                f"{whose} did not send its part; it is gone, cannot be reached, or took longer "
                f"than refit.timeout_s={self.timeout_s:g} ({error})"
            ) from error
        return memory

    def _room(self, nbytes: int, tensor: bool) -> Memory:
        """The buffer, when nothing reads it any more."""
        room = self.room
        if isinstance(room, torch.Tensor):
            port_of(room.device).wait()
        if room is None or room.nbytes < nbytes or isinstance(room, torch.Tensor) != tensor:
            if room is not None:
                self.agent.deregister(room)
            self.room = None
            if tensor:
                room = _on_gpu(nbytes, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
            else:
                room = host_memory(nbytes)
            self.agent.register(room)
            self.room = room
        return room

    def _know(self, source: int, told: Told) -> None:
        if self.peers.get(source) == told.agent:
            return
        self._forget(source)  # it was another process
        self.agent.meet(told)
        self.peers[source] = told.agent

    def _forget(self, source: int) -> None:
        if (name := self.peers.pop(source, None)) is not None:
            self.agent.leave(name)

    def _read(self, told: Told, memory: Memory, runs: Sequence[tuple[int, int]]) -> None:
        request = self.agent.read(told, memory, runs)
        deadline = time.monotonic() + self.timeout_s
        while not self.agent.done(request):
            if time.monotonic() > deadline:
                ABANDONED.append((self.agent, request, memory))
                self.room = None
                raise TimeoutError(f"no answer within {self.timeout_s:g} s")
            time.sleep(POLL_S)


class Agent:
    """NIXL in this process, over UCX."""

    def __init__(self):
        os.environ.setdefault(*UNRELEASED)
        try:
            from nixl_cu13 import _bindings as nixl
        except ImportError as error:
            raise RefitError(f"refit.transport=nixl: {error}") from error
        # Any of what NIXL raises.
        self.errors = tuple(
            one
            for one in vars(nixl).values()
            if isinstance(one, type) and issubclass(one, Exception)
        )
        self.nixl, self.name = nixl, f"lora_moe_rl-{uuid.uuid4().hex}"
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        try:
            self.agent = nixl.nixlAgent(self.name, config)
            self.agent.createBackend("UCX", {})
        except self.errors as error:
            raise RefitError(
                f"refit.transport=nixl: NIXL does not start with UCX ({error}); its messages are "
                "in this process's log, or use refit.transport=distributed"
            ) from error

    def register(self, memory: Memory) -> None:
        """Raises RefitError when it cannot be."""
        try:
            self.agent.registerMem(self._registered(memory))
        except self.errors as error:
            raise RefitError(
                f"{memory.nbytes:,} bytes of an adapter cannot be registered with NIXL ({error}): "
                "let the container lock memory (ulimit -l unlimited), on a GPU have the driver's "
                "nvidia_peermem or DMA-BUF; or use refit.transport=distributed"
            ) from error

    def deregister(self, memory: Memory) -> None:
        self.agent.deregisterMem(self._registered(memory))

    def tell(self, memory: Memory) -> Told:
        metadata = base64.b64encode(self.agent.getLocalMD()).decode()
        return Told(self.name, metadata, *_place(memory), isinstance(memory, torch.Tensor))

    def meet(self, told: Told) -> None:
        self.agent.loadRemoteMD(base64.b64decode(told.metadata))

    def leave(self, name: str) -> None:
        self.agent.invalidateRemoteMD(name)

    def read(self, told: Told, memory: Memory, runs: Sequence[tuple[int, int]]) -> int:
        """Begins to read bytes of a part into the same places of `memory`; returns the request."""
        kind, address, device = _place(memory)
        mine = [(address + start, stop - start, device) for start, stop in runs]
        theirs = [(told.address + start, stop - start, told.device) for start, stop in runs]
        request = self.agent.createXferReq(
            self.nixl.NIXL_READ,
            self.nixl.nixlXferDList(self._kind(kind), mine),
            self.nixl.nixlXferDList(self._kind(told.kind), theirs),
            told.agent,
        )
        try:
            self.agent.postXferReq(request)
        except self.errors:
            self.agent.releaseXferReq(request)
            raise
        return request

    def done(self, request: int) -> bool:
        """Raises one of `errors` when it failed."""
        try:
            if self.agent.getXferStatus(request) == self.nixl.NIXL_IN_PROG:
                return False
        except self.errors:
            self.agent.releaseXferReq(request)
            raise
        self.agent.releaseXferReq(request)
        return True

    def _registered(self, memory: Memory) -> Any:
        kind, address, device = _place(memory)
        return self.nixl.nixlRegDList(self._kind(kind), [(address, memory.nbytes, device, "")])

    def _kind(self, name: str) -> Any:
        return {"DRAM": self.nixl.DRAM_SEG, "VRAM": self.nixl.VRAM_SEG}[name]


def _place(memory: Memory) -> tuple[str, int, int]:
    """What kind of memory NIXL takes it for, its address, and its device's number."""
    if isinstance(memory, np.ndarray):
        return "DRAM", memory.ctypes.data, 0
    if memory.device.type == "cpu":
        return "DRAM", memory.data_ptr(), 0
    return "VRAM", memory.data_ptr(), memory.device.index


def _on_gpu(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of a device, uint8 `[nbytes]`. Raises RefitError when there is no room, or when others
    could not read it."""
    if name := expandable_segments():
        raise RefitError(
            f"refit.transport=nixl: {name} has expandable_segments:True, whose memory others "
            "cannot read: take it out; or use distributed"
        )
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise RefitError(
            f"no room on the GPU for {nbytes:,} bytes of an adapter, which refit.transport=nixl "
            "keeps there: use distributed; or lower trainer.micro_batch_tokens on the trainer's "
            "GPUs, rollout.gpu_memory_utilization on the engines'"
        ) from error
