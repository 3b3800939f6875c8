"""Shared memory on one machine: the worker maps the sender's buffer, and nothing is copied.

The memory has no name in any file system: it goes with the trainer rank's process, however that
ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from lora_moe_rl.config import RefitConfig
from lora_moe_rl.refit import transports
from lora_moe_rl.refit.parts import PartLayout, SentPart, check_room, open_part

if TYPE_CHECKING:
    import torch


class Channel(transports.Channel):
    @staticmethod
    def unfit(places: Sequence[str]) -> str | None:
        if len(set(places)) == 1:
            return None
        return (
            "needs all trainer ranks and engines on one machine, in one container and as one user, "
            "and they are not; use distributed or directory"
        )

    def outgoing(self, layout: PartLayout, host: str) -> Outgoing:
        return Outgoing()

    def incoming(self, rank: int) -> Incoming:
        return Incoming()


SHARED_MEMORY = Channel(RefitConfig(transport="shm"))


class Outgoing:
    """A trainer rank's memory, and its path in /proc."""

    def memory(self, nbytes: int, device: torch.device) -> np.ndarray:
        check_room(nbytes)  # memory without a name has no limit of its own but the machine's
        self.descriptor = os.memfd_create("lora_moe_rl")
        os.posix_fallocate(self.descriptor, 0, nbytes)  # to run out while writing kills the process
        return np.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=np.uint8)

    def offer(self, sent: SentPart) -> SentPart:
        return replace(sent, path=f"/proc/{os.getpid()}/fd/{self.descriptor}")


class Incoming:
    """Maps each sender's buffer once: to map its pages anew for every version takes longer than to
    copy them."""

    def __init__(self):
        self.mapped: dict[int, tuple[tuple[str, int], np.ndarray]] = {}

    def open(self, layout: PartLayout, sent: SentPart) -> np.ndarray:
        try:
            # A process that follows another may have its number, but not its memory's.
            sender = (sent.path, os.stat(sent.path).st_ino)
        except OSError:
            return open_part(sent.path, sent.nbytes)  # says what is wrong
        if self.mapped.get(sent.source, (None,))[0] != sender:
            self.mapped[sent.source] = (sender, open_part(sent.path, sent.nbytes))
        return self.mapped[sent.source][1]
