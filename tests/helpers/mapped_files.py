"""Memory that goes from one process to another without a GPU: files that are mapped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.base.contents import Contents, Kept
from lora_moe_rl.base.ipc_store import share_store

NAMES = ("one", "two", "three", "four", "five")
CONTENTS = Contents({"model": "a"}, {name: Kept("bfloat16", (3, 5)) for name in NAMES})
WHOLE = dict.fromkeys(NAMES, Box((0, 0), (3, 5)))


class Files:
    """A port as `base/ipc.py` has it, in a directory."""

    def __init__(self, directory: Path, gpu: str = "GPU-1"):
        self.directory, self.gpu, self.count = directory, gpu, 0

    def device(self) -> str:
        return self.gpu

    def empty(self, nbytes: int) -> torch.Tensor:
        self.count += 1
        return torch.from_file(
            str(self.directory / self._name), shared=True, size=nbytes, dtype=torch.uint8
        )

    def share(self, memory: torch.Tensor) -> dict[str, Any]:
        return {"file": self._name, "nbytes": memory.nbytes}

    @property
    def _name(self) -> str:
        return f"{self.gpu}-{os.getpid()}-{self.count}"

    def open(self, told: dict[str, Any]) -> torch.Tensor:
        path = self.directory / told["file"]
        return torch.from_file(str(path), shared=True, size=told["nbytes"], dtype=torch.uint8)


def fill(name: str, out: torch.Tensor) -> None:
    out.copy_(torch.arange(15).view(3, 5) + NAMES.index(name) * 0.5)


def own(folder: Path, port: Files, ready: Any) -> None:
    """A process that shares a base until it is killed."""
    store = share_store(folder, CONTENTS, WHOLE, fill, port)
    ready.set()
    signal.pause()
    store.close()
