"""Safetensors files with the mode that the umask gives, which safetensors does not ask: its are
0600."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def save_safetensors(
    tensors: Mapping[str, np.ndarray], path: Path, metadata: dict[str, str] | None = None
) -> None:
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata)
    path.chmod(mode)
