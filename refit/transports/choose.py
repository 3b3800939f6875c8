"""Which transport a run uses, and its two ends.

trainer rank    make_outgoing(...).offer(part, buffer) -> the part, with where it is to be had
engine worker   make_incoming(...).open(layout, part) -> its buffer
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, Protocol

import numpy as np

from lora_moe_rl.config import RefitConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.refit.parts import PartLayout, SentPart


@dataclass(frozen=True)
class Wire:
    """The transport of a run, as both ends are told. `directory`: of transport directory.
    `timeout_s`: longest wait of transport distributed for its other end."""

    kind: Literal["shm", "distributed", "directory"] = "shm"
    directory: str = ""
    timeout_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


SHARED_MEMORY = Wire()


class Outgoing(Protocol):
    """A trainer rank's end."""

    def offer(self, sent: SentPart, buffer: np.ndarray) -> SentPart:
        """Makes a part ready to be fetched, from its buffer (uint8 `[sent.nbytes]`), which stays as
        it is until the next version. Returns it with the `path` that the other end needs."""
        ...


class Incoming(Protocol):
    """An engine worker's end."""

    def open(self, layout: PartLayout, sent: SentPart) -> np.ndarray:
        """The part's buffer, uint8 `[sent.nbytes]`, as it is at the sender wherever a box for this
        worker lies. Raises RefitError when it cannot be had."""
        ...


def choose(config: RefitConfig, trainer: Iterable[str], engines: Iterable[str]) -> Wire:
    """`trainer` and `engines`: where each of them runs, see `shm.place`.

    Raises ConfigError for shared memory between processes that do not share any.
    """
    together = len({*trainer, *engines}) == 1
    kind = config.transport
    if kind == "auto":
        kind = "shm" if together else "distributed"
    if kind == "shm" and not together:
        raise ConfigError(
            "refit.transport=shm needs all trainer ranks and engines on one machine, in one "
            "container and as one user, and they are not; use distributed or directory"
        )
    return Wire(kind, config.directory or "", config.timeout_s)


class _NoChannel:
    """Of a transport that needs nothing of the controller."""

    async def published(self, parts) -> None:
        pass

    def keep(self, versions: Iterable[int]) -> None:
        pass


class _DirectoryChannel:
    """The version is whole in the directory when engines take it, and those that no slot needs any
    more are removed after it."""

    def __init__(self, directory: str):
        self.directory = directory

    async def published(self, parts) -> None:
        from lora_moe_rl.refit.transports import directory

        directory.publish(self.directory, await parts())

    def keep(self, versions: Iterable[int]) -> None:
        from lora_moe_rl.refit.transports import directory

        directory.keep_only(self.directory, versions)


def make_channel(wire: Wire):
    return _DirectoryChannel(wire.directory) if wire.kind == "directory" else _NoChannel()


def make_outgoing(wire: Wire, layout: PartLayout, host: str) -> Outgoing:
    """`host`: the address under which others reach this rank."""
    if wire.kind == "shm":
        from lora_moe_rl.refit.transports import shm

        return shm.Outgoing()
    if wire.kind == "directory":
        from lora_moe_rl.refit.transports import directory

        return directory.Outgoing(wire.directory, layout)
    from lora_moe_rl.refit.transports import distributed

    return distributed.Outgoing(layout, host, wire.timeout_s)


def make_incoming(wire: Wire, rank: int) -> Incoming:
    """`rank`: the worker's own in its engine."""
    if wire.kind == "shm":
        from lora_moe_rl.refit.transports import shm

        return shm.Incoming()
    if wire.kind == "directory":
        from lora_moe_rl.refit.transports import directory

        return directory.Incoming(wire.directory, rank)
    from lora_moe_rl.refit.transports import distributed

    return distributed.Incoming(rank, wire.timeout_s)
