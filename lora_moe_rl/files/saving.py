"""Writes safetensors files tensor by tensor. The safetensors package writes none that are not whole
in memory; what is written here is the same to the last byte."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

Shapes = Mapping[str, tuple[int, ...]]
_DTYPES = {"int64": "I64", "float32": "F32"}  # the larger first, as they stand in a file


@dataclass(frozen=True)
class FileSum:
    """Bytes and SHA-256 of a file, as its writer knows them."""

    size: int
    sha256: str

    def as_json(self) -> dict[str, int | str]:
        return asdict(self)


def save_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> FileSum:
    """Writes arrays, int64 or float32. They are on the disk when this returns. Raises OSError when
    the disk refuses."""
    kinds, digest = list(_DTYPES), hashlib.sha256()
    names = sorted(tensors, key=lambda name: (kinds.index(tensors[name].dtype.name), name))
    layout = {name: (_DTYPES[tensors[name].dtype.name], tensors[name].shape) for name in names}
    with open(path, "wb") as file:
        for part in (_header(layout, {}), *(_bytes(tensors[name]) for name in names)):
            digest.update(part)
            file.write(part)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return FileSum(size, digest.hexdigest())


def stream_safetensors(
    path: Path,
    shapes: Shapes,
    tensors: Iterable[tuple[str, np.ndarray]],
    metadata: Callable[[], dict[str, str]],
) -> None:
    """Writes float32 arrays of `shapes`, which come in the order of their names, one after the
    other. `metadata` is asked before the first of them and after the last; what it says then is
    what is in the file, and is as long.

    Raises OSError when the disk refuses, ValueError for a tensor that is not the next one.
    """
    names = sorted(shapes)
    layout = {name: ("F32", shapes[name]) for name in names}
    with open(path, "wb") as file:
        header = _header(layout, metadata())
        file.write(header)
        for name, (found, values) in zip(names, tensors, strict=True):
            if (found, values.shape, values.dtype) != (name, shapes[name], np.float32):
                raise ValueError(f"{found} {values.shape} came for {name} {shapes[name]}")
            file.write(_bytes(values))
        final = _header(layout, metadata())
        if len(final) != len(header):
            raise ValueError(f"the header of {path} has become longer while it was written")
        file.seek(0)
        file.write(final)


def _header(
    layout: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Its length and the header, of tensors that follow each other in this order."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape) in layout.items():
        start, end = end, end + math.prod(shape) * (8 if dtype == "I64" else 4)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(values: np.ndarray) -> memoryview:
    """Little-endian, as they lie in memory."""
    flat = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<")).reshape(-1)
    return memoryview(flat.view(np.uint8))
