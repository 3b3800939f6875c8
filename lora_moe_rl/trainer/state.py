"""Writes and reads a rank's part of the trainer's state: see `files/trainer_state.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from lora_moe_rl.adapters.attach import Adapters
from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.errors import CheckpointError
from lora_moe_rl.files.checkpoint import disk_errors
from lora_moe_rl.files.saving import save_safetensors
from lora_moe_rl.files.trainer_state import BEGAN, MOMENTS, Whose, files, key, parse
from lora_moe_rl.trainer.optimizer import AdapterOptimizer


def save(path: Path, adapters: Adapters, optimizer: AdapterOptimizer) -> None:
    """Writes a file of this rank's part."""
    tensors = {}
    sources = {"adapter": None} | {moment: optimizer.state(moment) for moment in MOMENTS}
    for kind, of in sources.items():
        for shard in adapters.export(of):
            tensors[key(kind, shard.name, shard.start)] = np.ascontiguousarray(shard.data)
    for s in adapters.slices():
        site, _, matrix = s.name.rpartition(".")
        if matrix == "A" and s.exported and not any(s.start) and site in optimizer.began:
            tensors[key(BEGAN, site, (0,))] = np.array([optimizer.began[site]])
    with disk_errors(path.parent):
        save_safetensors(tensors, path)


def load(
    directory: Path, whose: Whose, adapters: Adapters, optimizer: AdapterOptimizer, steps: int
) -> None:
    """Reads this rank's parts, whatever layout wrote them. Raises CheckpointError when an element
    is missing."""
    index = _Index(directory, whose)
    optimizer.restore(steps, index.began())
    targets = {"adapter": None} | {moment: optimizer.state(moment) for moment in MOMENTS}
    with torch.no_grad():
        for kind, into in targets.items():
            for s in adapters.slices():
                if into is not None and not s.trained:
                    continue
                target = (s.tensor if into is None else into(s.tensor)).detach()[s.index]
                part = index.read(kind, s.name, s.start, tuple(target.shape))
                target.copy_(torch.from_numpy(part))


class _Index:
    """Where every slice lies, from the headers of all files."""

    def __init__(self, directory: Path, whose: Whose):
        self.where: dict[tuple[str, str], list[tuple[tuple[int, ...], str, Path]]] = {}
        paths = files(directory, whose)
        if not paths:
            raise CheckpointError(f"{directory} holds no state of a {whose}")
        self.files = {path: safe_open(path, framework="np") for path in paths}
        for path, handle in self.files.items():
            for text in list(handle.keys()):
                kind, name, start = parse(text)
                self.where.setdefault((kind, name), []).append((start, text, path))

    def began(self) -> dict[str, int]:
        """Of sites whose moments are younger than the run: the step at which they began."""
        return {
            name: int(self.files[path].get_tensor(text)[0])
            for (kind, name), places in self.where.items()
            if kind == BEGAN
            for _, text, path in places
        }

    def read(self, kind: str, name: str, start: tuple[int, ...], shape: tuple[int, ...]):
        """The window `start + shape` of one tensor, float32."""
        out = np.empty(shape, dtype=np.float32)
        covered = 0
        wanted = Box(start, shape)
        for begin, text, path in self.where.get((kind, name), []):
            part = self.files[path].get_slice(text)
            held = Box(begin, tuple(part.get_shape()))
            if common := wanted.common(held):
                out[common.within(wanted)] = part[common.within(held)]
                covered += common.size
        if covered != out.size:
            raise CheckpointError(
                f"{kind} of {name}: {covered} of {out.size} elements are in the checkpoint"
            )
        return out
