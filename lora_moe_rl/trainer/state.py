"""Writes and reads a rank's part of the trainer's state: see `files/trainer_state.py`.

The same slices, under the same keys, are held in memory after each step (`Held`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import safe_open

from lora_moe_rl.adapters.attach import Adapters
from lora_moe_rl.adapters.sharding import Box
from lora_moe_rl.errors import CheckpointError
from lora_moe_rl.files.checkpoint import disk_errors
from lora_moe_rl.files.saving import FileSum, save_safetensors
from lora_moe_rl.files.trainer_state import BEGAN, MOMENTS, Done, Whose, files, key, parse
from lora_moe_rl.trainer.optimizer import AdapterOptimizer

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Held:
    """A rank's part of the state in memory. `meta`: what a checkpoint's manifest would hold;
    `tensors`: what each of its files would; `digest`: of both, xxh3-64."""

    meta: dict[str, int]
    tensors: dict[Whose, Tensors]
    digest: int

    @staticmethod
    def of(meta: dict[str, int], tensors: dict[Whose, Tensors]) -> Held:
        return Held(meta, tensors, _digest(meta, tensors))


def check_held(parts: Sequence[Held]) -> None:
    """Raises CheckpointError unless the parts of all ranks are whole, and of one moment."""
    for rank, part in enumerate(parts):
        if _digest(part.meta, part.tensors) != part.digest:
            raise CheckpointError(f"the copy of trainer rank {rank}'s state in memory is damaged")
        if part.meta != parts[0].meta:
            raise CheckpointError(
                f"the copies of the trainer's state in memory are of different moments: rank 0 has "
                f"{parts[0].meta}, rank {rank} {part.meta}"
            )


def _digest(meta: dict[str, int], tensors: dict[Whose, Tensors]) -> int:
    found = xxhash.xxh3_64(repr(sorted(meta.items())).encode())
    for whose, of in sorted(tensors.items()):
        for name, values in sorted(of.items()):
            found.update(f"{whose}|{name}|{values.shape}".encode())
            found.update(values)
    return found.intdigest()


def collect(adapters: Adapters, optimizer: AdapterOptimizer) -> Tensors:
    """Copies of all that this rank's part of the state is, contiguous, by key."""
    tensors = {}
    sources = {"adapter": None} | {moment: optimizer.state(moment) for moment in MOMENTS}
    for kind, of in sources.items():
        for shard in adapters.export(of):
            tensors[key(kind, shard.name, shard.start)] = np.ascontiguousarray(shard.data)
    began = optimizer.beginnings
    for s in adapters.slices():
        site, _, matrix = s.name.rpartition(".")
        if matrix == "A" and s.exported and not any(s.start) and site in began:
            tensors[key(BEGAN, site, (0,))] = np.array([began[site]])
    return tensors


def save(path: Path, adapters: Adapters, optimizer: AdapterOptimizer) -> FileSum:
    """Writes a file of this rank's part, which is on the disk then. Raises DiskError."""
    tensors = collect(adapters, optimizer)
    with disk_errors(path.parent):
        return save_safetensors(path, tensors)


def load(
    directory: Path, whose: Whose, adapters: Adapters, optimizer: AdapterOptimizer, done: Done
) -> None:
    """Reads this rank's parts, whatever layout wrote them. Raises CheckpointError when an element
    is missing."""
    paths = files(directory, whose)
    if not paths:
        raise CheckpointError(f"{directory} holds no state of a {whose}")
    _load([_of_file(path) for path in paths], adapters, optimizer, done)


def load_held(
    parts: Sequence[Held],
    whose: Whose,
    adapters: Adapters,
    optimizer: AdapterOptimizer,
    done: Done,
) -> None:
    """The same from memory: `parts` of all ranks."""
    _load([part.tensors[whose] for part in parts], adapters, optimizer, done)


def _of_file(path: Path) -> Mapping[str, Any]:
    handle = safe_open(path, framework="np")
    return {text: handle.get_slice(text) for text in list(handle.keys())}


def _load(
    sources: Iterable[Mapping[str, Any]],
    adapters: Adapters,
    optimizer: AdapterOptimizer,
    done: Done,
) -> None:
    """`sources`: by key, arrays or safetensors' slices of files."""
    index = _Index(sources)
    anew = optimizer.restore(done, index.began())
    targets = {"adapter": None} | {moment: optimizer.state(moment) for moment in MOMENTS}
    with torch.no_grad():
        for kind, into in targets.items():
            for s in adapters.slices():
                if into is not None and (not s.trained or s.tensor in anew):
                    continue
                target = (s.tensor if into is None else into(s.tensor)).detach()[s.index]
                part = index.read(kind, s.name, s.start, tuple(target.shape))
                target.copy_(torch.from_numpy(part))


class _Index:
    """Where every slice lies, by kind and tensor or site, from the keys of all sources."""

    def __init__(self, sources: Iterable[Mapping[str, Any]]):
        self.where: dict[tuple[str, str], list[tuple[tuple[int, ...], Any]]] = {}
        for source in sources:
            for text, part in source.items():
                kind, name, start = parse(text)
                self.where.setdefault((kind, name), []).append((start, part))

    def began(self) -> dict[str, int]:
        """The step at which the moments of a site began, of those that are younger than the run."""
        return {
            name: int(part[:][0])
            for (kind, name), places in self.where.items()
            if kind == BEGAN
            for _, part in places
        }

    def read(self, kind: str, name: str, start: tuple[int, ...], shape: tuple[int, ...]):
        """The window `start + shape` of one tensor, float32."""
        out = np.empty(shape, dtype=np.float32)
        covered = 0
        wanted = Box(start, shape)
        for begin, part in self.where.get((kind, name), []):
            shape = part.shape if isinstance(part, np.ndarray) else part.get_shape()
            held = Box(begin, tuple(shape))
            if common := wanted.common(held):
                out[common.within(wanted)] = part[common.within(held)]
                covered += common.size
        if covered != out.size:
            raise CheckpointError(
                f"{kind} of {name}: {covered} of {out.size} elements are in the checkpoint"
            )
        return out
