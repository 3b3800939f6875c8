"""Slices of canonical tensors, and their assembly into whole ones.

A trainer rank holds a slice of each canonical tensor of its layers. A slice says where it lies in
the whole, so that assembly needs no knowledge of the layout that cut it, and proves that every
element arrived exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from lora_moe_rl.errors import AdapterError


@dataclass(frozen=True)
class Shard:
    """`data` lies at `start` (one offset a dimension) in the canonical tensor `name`."""

    name: str
    start: tuple[int, ...]
    data: np.ndarray


def assemble(
    shapes: Mapping[str, tuple[int, ...]], shards: Iterable[Shard]
) -> dict[str, np.ndarray]:
    """Whole tensors `{name: float32 array}` of the given shapes.

    Raises AdapterError for an unknown name, a slice that leaves its tensor, an element that no
    slice covers, one that two slices cover, or a value that is not finite.
    """
    pieces: dict[str, list[Shard]] = {name: [] for name in shapes}
    for shard in shards:
        if shard.name not in pieces:
            raise AdapterError(f"tensor {shard.name} is not part of this adapter")
        pieces[shard.name].append(shard)
    return {name: _assemble_one(name, shapes[name], parts) for name, parts in pieces.items()}


def _assemble_one(name: str, shape: tuple[int, ...], parts: list[Shard]) -> np.ndarray:
    if len(parts) == 1 and parts[0].data.shape == shape and not any(parts[0].start):
        whole = np.asarray(parts[0].data, dtype=np.float32)
    else:
        whole = _place(name, shape, parts)
    if not np.isfinite(whole).all():
        raise AdapterError(f"tensor {name} holds NaN or infinite values")
    return whole


def _place(name: str, shape: tuple[int, ...], parts: list[Shard]) -> np.ndarray:
    if (got := sum(part.data.size for part in parts)) < (size := math.prod(shape)):
        # Before memory is taken for what the shape alone claims.
        raise AdapterError(f"tensor {name}: {size - got} elements missing of the shape {shape}")
    whole = np.empty(shape, dtype=np.float32)
    seen = np.zeros(shape, dtype=np.uint8)
    for part in parts:
        if part.data.ndim != len(shape):
            raise AdapterError(f"tensor {name}: a slice of shape {part.data.shape} for {shape}")
        where = tuple(slice(s, s + n) for s, n in zip(part.start, part.data.shape, strict=True))
        if any(w.start < 0 or w.stop > n for w, n in zip(where, shape, strict=True)):
            raise AdapterError(
                f"tensor {name}: slice {part.start}+{part.data.shape} leaves the shape {shape}"
            )
        whole[where] = part.data
        seen[where] += 1
    if not (seen == 1).all():
        raise AdapterError(
            f"tensor {name}: {int((seen == 0).sum())} elements missing, "
            f"{int((seen > 1).sum())} sent more than once"
        )
    return whole
