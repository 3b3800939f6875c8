"""How a part of an adapter version gets from a trainer rank into an engine worker.

Every module in this folder is a transport, known by the module's name, and defines a `Channel`:
both ends, the memory that a trainer rank packs its part into, and what the controller has to do.

trainer rank    channel.outgoing(layout, host): .memory(nbytes, device), then .offer(part) of each
                version
controller      channel.published(parts) before engines take a version, channel.keep(versions) after
engine worker   channel.incoming(rank).open(layout, part) -> the part's buffer

A transport only moves bytes. What the bytes are, and the checks of them, are the same for all: see
`refit/parts.py`. docs/adding/transport.md tells how to add one. Importing this imports no torch.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lora_moe_rl.errors import ConfigError
from lora_moe_rl.upstream.versions import importable

if TYPE_CHECKING:
    import torch

    from lora_moe_rl.config import RefitConfig
    from lora_moe_rl.refit.parts import Memory, PartLayout, SentPart

AUTO = ("shm", "distributed")  # the first of them that fits is refit.transport=auto
ON_GPU = ("cuda_ipc", "nixl")  # a version's part stays on its trainer rank's GPU


class Outgoing(Protocol):
    """A trainer rank's end."""

    def memory(self, nbytes: int, device: torch.device) -> Memory:
        """Where the sender packs the rank's part of every version: uint8 `[nbytes]`, asked for
        once; an array on the host, or a tensor on `device`, where the adapters are, and where it is
        then checked too. Raises RefitError when there is no room."""
        ...

    def offer(self, sent: SentPart) -> SentPart:
        """Makes a part ready to be fetched: its bytes are in the memory, and stay there until the
        next version. Returns it with the `path` that the other end needs."""
        ...


class Incoming(Protocol):
    """An engine worker's end."""

    def open(self, layout: PartLayout, sent: SentPart) -> Memory:
        """The part's buffer, uint8 `[sent.nbytes]`, as it is at the sender wherever a box for this
        worker lies: an array or a tensor as at the sender. The next `open` may overwrite it, where
        `Channel.one_part`. Raises RefitError when it cannot be had."""
        ...


class Channel:
    """The transport of a run. Made by the controller, which tells it to both ends.

    `settings`: the run's section `refit`, with this transport's name in `transport`.
    """

    # Whether what a trainer rank has offered is still there when its process is not.
    parts_last = False
    # Whether a worker has room for one part of a version at a time.
    one_part = False
    modules: tuple[str, ...] = ()  # that both ends import

    def __init__(self, settings: RefitConfig):
        self.settings = settings

    @staticmethod
    def unfit(places: Sequence[str]) -> str | None:
        """Why processes at these places (see `place`) cannot use it, as what follows
        "refit.transport=NAME" in an error; None when they can."""
        return None

    def outgoing(self, layout: PartLayout, host: str) -> Outgoing:
        """`host`: the address under which others reach this trainer rank."""
        raise NotImplementedError

    def incoming(self, rank: int) -> Incoming:
        """`rank`: the worker's own in its engine."""
        raise NotImplementedError

    async def published(self, parts: Callable[[], Awaitable[Sequence[SentPart]]]) -> None:
        """Called by the controller before engines take a version. `parts()` waits until all its
        parts are offered, and returns them; a transport that needs nothing done does not ask."""

    def keep(self, versions: Iterable[int]) -> None:
        """Called by the controller when engines have taken a version. Only `versions` may be asked
        for from now on: what is held of others can go."""

    def to_json(self) -> str:
        return self.settings.model_dump_json()


def from_json(text: str) -> Channel:
    """The channel that another process of the run has chosen and described."""
    from lora_moe_rl.config import RefitConfig

    return channel(RefitConfig.model_validate_json(text))


def transport_names() -> tuple[str, ...]:
    """What refit.transport can be, beside auto."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def channel(settings: RefitConfig) -> Channel:
    """The channel of the transport that `settings.transport` names."""
    return importlib.import_module(f"{__name__}.{settings.transport}").Channel(settings)


def lacking(kind: Channel) -> list[str]:
    """Modules of a transport that are not installed here."""
    return [module for module in kind.modules if not importable(module)]


def check(settings: RefitConfig) -> None:
    """Raises ConfigError for a transport that lacks a package here, or cannot do what is asked."""
    if settings.transport == "auto":
        return
    kind = channel(settings)
    for module in lacking(kind):
        raise ConfigError(
            f"refit.transport={settings.transport} needs {module}, which is not installed: pip "
            f"install {module.replace('_', '-')}, or use refit.transport=auto"
        )
    if kind.one_part and settings.mode == "merged":
        raise ConfigError(
            f"refit.transport={settings.transport} has room for one part of a version at a time, "
            "and refit.mode=merged needs all of them until weights are changed; use "
            "refit.transport=auto"
        )


def choose(settings: RefitConfig, trainer: Iterable[str], engines: Iterable[str]) -> Channel:
    """`trainer` and `engines`: where each of them runs, see `place`.

    Raises ConfigError for a transport that processes at these places cannot use, and as `check`.
    """
    check(settings)
    places, reason = [*trainer, *engines], None
    names = AUTO if settings.transport == "auto" else (settings.transport,)
    for name in names:
        found = channel(settings.model_copy(update={"transport": name}))
        reason = found.unfit(places)
        if reason is None:
            return found
    raise ConfigError(f"refit.transport={settings.transport} {reason}")


def place() -> str:
    """Equal for processes that see each other's memory: one machine, one container, one user."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine}/{os.readlink('/proc/self/ns/pid')}/{os.getuid()}"
