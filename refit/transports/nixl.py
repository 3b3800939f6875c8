"""NIXL: a worker reads what it needs out of a trainer rank's memory, over RDMA, NVLink or TCP.

A part stays where it was packed, on the host or on a GPU, and its memory is registered once with
UCX, which finds the way: `SentPart.path` tells workers of both, as JSON. A read is one-sided: the
trainer rank does nothing for it (over TCP NIXL's thread there answers), and does not notice a
worker that is lost. Nor does it see which version is asked for: bytes of another one have other
checksums.

NIXL's Python class lets a thread of its own spin on one core as long as it lives; here are the
bindings below it, with a thread that sleeps until something comes.
"""

from __future__ import annotations

import base64
import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lora_moe_rl.base.ipc import Cuda
from lora_moe_rl.errors import NotShared, RefitError
from lora_moe_rl.refit import transports
from lora_moe_rl.refit.copies import port_of
from lora_moe_rl.refit.parts import PartLayout, SentPart, host_memory

if TYPE_CHECKING:
    from lora_moe_rl.refit.parts import Memory

PROGRESS_US = 10_000  # the longest sleep of NIXL's thread; it wakes when something comes
POLL_S = 2e-4
KINDS = ("DRAM", "VRAM")  # NIXL's kinds of memory
# What UCX is told unless the environment says otherwise.
VARIABLES = {
    # It keeps the registration of memory that is gone, without bound unless it is told one; vLLM's
    # connectors set the same (`vllm/distributed/nixl_utils.py`).
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_DEBUG_SIGNO": "0",  # else SIGHUP makes it log all it does, and ends no process any more
}


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
    kind: str  # one of KINDS
    address: int
    device: int
    tensor: bool  # whether it is memory of a device to sender and receiver

    @classmethod
    def read(cls, path: str) -> Told:
        """Raises ValueError or TypeError for what is none."""
        told = cls(**json.loads(path))
        texts, numbers = (told.agent, told.metadata), (told.address, told.device)
        if not all(isinstance(one, str) for one in texts) or told.kind not in KINDS:
            raise ValueError(f"it names no agent and kind of memory: {path[:80]}")
        if not all(type(one) is int and 0 <= one < 2**63 for one in numbers):
            raise ValueError(f"it tells no place: address {told.address}, device {told.device}")
        return told


@dataclass(frozen=True)
class Late:
    """A read that did not end in time, and may still write: until it has ended, its room is not
    used, nor freed, and its peer not forgotten."""

    agent: Agent
    request: int
    room: Memory
    peer: str


LATE: list[Late] = []  # of this process: also when the end that began it is gone


class Outgoing:
    """A trainer rank's memory, registered, and what opens it."""

    def memory(self, nbytes: int, device: torch.device) -> Memory:
        self.agent = Agent()
        buffer = _on_gpu(nbytes) if device.type == "cuda" else host_memory(nbytes)
        self.agent.register(buffer)
        self.told = json.dumps(vars(self.agent.tell(buffer)))
        return buffer

    def offer(self, sent: SentPart) -> SentPart:
        return replace(sent, path=self.told)


class Incoming:
    """An engine worker's end. All parts come through one room, one after the other, which grows to
    the largest part: what `open` has returned is overwritten by the next."""

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
        _end_late(self.agent)
        try:
            memory = self._room_for(layout.nbytes, told.tensor)[: layout.nbytes]
            if runs := layout.runs(self.rank):
                self._know(sent.source, told)
                self._read(told, memory, runs)
        except (*self.agent.errors, TimeoutError, ValueError) as error:
            if not isinstance(error, TimeoutError):
                self._forget(sent.source)
            raise RefitError(
                f"{whose} did not send its part; it is gone, cannot be reached, or took longer "
                f"than refit.timeout_s={self.timeout_s:g} ({error})"
            ) from error
        return memory

    def _room_for(self, nbytes: int, tensor: bool) -> Memory:
        """When nothing uses it any more: reads do not wait for the stream of a GPU."""
        room = self.room
        if room is None or room.nbytes < nbytes or isinstance(room, torch.Tensor) != tensor:
            if room is not None:
                self.agent.deregister(room)
            room = self.room = None  # before there is another
            if not tensor:
                room = host_memory(nbytes)
            elif torch.cuda.is_available():
                room = _on_gpu(nbytes)
            else:  # of a worker without a GPU, whose trainer has one
                room = torch.from_numpy(host_memory(nbytes))
            self.agent.register(room)
            self.room = room
        if isinstance(room, torch.Tensor):
            port_of(room.device).wait()
        return room

    def _know(self, source: int, told: Told) -> None:
        if self.peers.get(source) == told.agent:
            return
        self._forget(source)  # it was another process
        self.agent.meet(told)
        self.peers[source] = told.agent

    def _forget(self, source: int) -> None:
        name = self.peers.pop(source, None)
        if name is not None and not any(late.peer == name for late in LATE):
            self.agent.leave(name)

    def _read(self, told: Told, memory: Memory, runs: Sequence[tuple[int, int]]) -> None:
        request = self.agent.read(told, memory, runs)
        deadline = time.monotonic() + self.timeout_s
        while not self.agent.done(request):
            if time.monotonic() > deadline:
                LATE.append(Late(self.agent, request, self.room, told.agent))
                self.room = None
                raise TimeoutError(f"no answer within {self.timeout_s:g} s")
            time.sleep(POLL_S)


class Agent:
    """NIXL in this process, over UCX."""

    def __init__(self):
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        try:
            from nixl_cu13 import _bindings as nixl
        except ImportError as error:
            raise RefitError(f"refit.transport=nixl: {error}") from error
        own = (one for one in vars(nixl).values() if isinstance(one, type))
        # What NIXL raises, and its bindings for what C++ throws.
        self.errors = (RuntimeError, *(one for one in own if issubclass(one, Exception)))
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
        return getattr(self.nixl, f"{name}_SEG")


def _end_late(agent: Agent) -> None:
    """Gives up the rooms of reads that have ended since."""
    for late in [one for one in LATE if one.agent is agent]:
        try:
            if not agent.done(late.request):
                continue
        except agent.errors:  # it has failed, which is an end too
            pass
        LATE.remove(late)
        agent.deregister(late.room)


def _place(memory: Memory) -> tuple[str, int, int]:
    """What kind of memory NIXL takes it for, its address, and its device's number."""
    if isinstance(memory, np.ndarray):
        return "DRAM", memory.ctypes.data, 0
    if memory.device.type == "cpu":
        return "DRAM", memory.data_ptr(), 0
    return "VRAM", memory.data_ptr(), memory.device.index


def _on_gpu(nbytes: int) -> torch.Tensor:
    """Memory of the current GPU, uint8 `[nbytes]`. Raises RefitError when there is no room, or when
    others could not read it."""
    try:
        return Cuda().empty(nbytes).zero_()  # what is between boxes is looked at too
    except NotShared as error:
        raise RefitError(f"refit.transport=nixl: {error}; or use distributed") from error
    except torch.OutOfMemoryError as error:
        raise RefitError(
            f"no room on the GPU for {nbytes:,} bytes of an adapter, which refit.transport=nixl "
            "keeps there: use distributed; or lower trainer.micro_batch_tokens on the trainer's "
            "GPUs, rollout.gpu_memory_utilization on the engines'"
        ) from error
