"""Memory that goes from one process to another without a GPU: files that are mapped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


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
