"""Trainer state on disk: canonical slices in safetensors, so that any layout reads any other's.

Each rank writes one file with the slices it owns of the adapter and of Adam's two moments. The
key of a slice says which tensor it is part of and where it lies: `adapter|layers.0.q_proj.A|0,0`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from lora_moe_rl.adapters.attach import Adapters
from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.errors import CheckpointError
from lora_moe_rl.files.checkpoint import disk_errors
from lora_moe_rl.trainer.optimizer import AdapterOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(directory: Path, rank: int, adapters: Adapters, optimizer: AdapterOptimizer) -> None:
    """Writes `trainer_<rank>.safetensors`."""
    tensors = {}
    sources = {"adapter": None} | {moment: optimizer.state(moment) for moment in MOMENTS}
    for kind, of in sources.items():
        for shard in adapters.export(of):
            key = f"{kind}|{shard.name}|{','.join(map(str, shard.start))}"
            tensors[key] = np.ascontiguousarray(shard.data)
    with disk_errors(directory):
        save_file(tensors, directory / f"trainer_{rank:05d}.safetensors")


def load(directory: Path, adapters: Adapters, optimizer: AdapterOptimizer, steps: int) -> None:
    """Reads this rank's parts, whatever layout wrote them. Raises CheckpointError when an element
    is missing."""
    index = _Index(directory)
    optimizer.restore(steps)
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

    def __init__(self, directory: Path):
        self.where: dict[tuple[str, str], list[tuple[tuple[int, ...], str, Path]]] = {}
        files = sorted(directory.glob("trainer_*.safetensors"))
        if not files:
            raise CheckpointError(f"{directory} holds no trainer state")
        self.files = {path: safe_open(path, framework="np") for path in files}
        for path, handle in self.files.items():
            for key in list(handle.keys()):
                kind, name, start = key.split("|")
                place = (tuple(int(x) for x in start.split(",")), key, path)
                self.where.setdefault((kind, name), []).append(place)

    def read(self, kind: str, name: str, start: tuple[int, ...], shape: tuple[int, ...]):
        """The window `start + shape` of one tensor, float32."""
        out = np.empty(shape, dtype=np.float32)
        covered = 0
        wanted = Box(start, shape)
        for begin, key, path in self.where.get((kind, name), []):
            part = self.files[path].get_slice(key)
            held = Box(begin, tuple(part.get_shape()))
            if common := wanted.common(held):
                out[common.within(wanted)] = part[common.within(held)]
                covered += common.size
        if covered != out.size:
            raise CheckpointError(
                f"{kind} of {name}: {covered} of {out.size} elements are in the checkpoint"
            )
        return out
