"""Safetensors and JSON files that came from elsewhere, read without trust.

Nothing is unpickled, a name read from a file leads nowhere outside its directory, and a header is
checked against its file before a tensor is read. Reads are lazy: opening reads headers alone, and
`read` one tensor. Safetensors have no checksum: bits flipped in a tensor's data are not seen here.
"""

from __future__ import annotations

import json
import math
import os
import stat
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeGuard

from psutil import virtual_memory

from lora_moe_rl.errors import FileError

if TYPE_CHECKING:
    import torch

# safetensors' own limit of a header
MAX_HEADER = 100_000_000
LFS = b"version https://git-lfs"  # what a clone without Git LFS has in the place of a file
MOST_DIMENSIONS, LARGEST = 8, 1 << 63  # of a tensor, and of the product of its sizes but zeros
LARGE = 1 << 26  # bytes of a tensor, above which the machine is asked for room
MAX_JSON = MAX_HEADER  # the index of a model of a trillion weights has some 30 MB
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# {dtype in a header: (bytes of one element, name in torch)}
DTYPES = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U64": (8, "uint64"),
    "U32": (4, "uint32"),
    "U16": (2, "uint16"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
}
_FETCH = "fetch or write the file again"


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file. `start` and `end` count from the file's first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass
class SafeFile:
    """A safetensors file whose header was checked. `entries` are in the order of their bytes."""

    path: Path
    entries: dict[str, Entry]
    metadata: dict[str, str]
    _fd: int | None = field(default=None, repr=False)
    _opening: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def open(cls, path: Path) -> SafeFile:
        """Reads the header alone. Raises FileError for what is malformed."""
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            begin = file.read(8)
            if begin == LFS[:8] and file.read(len(LFS) - 8) == LFS[8:]:
                raise FileError(
                    f"{path} is a pointer of Git LFS, not the file itself; fetch it (git lfs pull)"
                )
            length = int.from_bytes(begin, "little")
            if size < 8 or length > size - 8:
                raise FileError(
                    f"{path} is truncated: it has {size:,} bytes, and its header claims "
                    f"{length:,}; {_FETCH}"
                )
            if length > MAX_HEADER:
                raise FileError(f"{path} has a header of {length:,} bytes, over {MAX_HEADER:,}")
            header = _json(file.read(length), path)
        metadata = header.pop("__metadata__", {})
        if not _is_text_map(metadata):
            raise FileError(f"{path}: __metadata__ of its header is no map of texts; {_FETCH}")
        first = 8 + length
        found = sorted(
            (_entry(path, name, value, first) for name, value in header.items()),
            key=lambda entry: (entry.start, entry.end),
        )
        end = first
        for entry in found:
            if entry.start != end:
                raise FileError(
                    f"{path}: {entry.name} starts at byte {entry.start:,}, and what stands before "
                    f"it ends at {end:,}; {_FETCH}"
                )
            end = entry.end
        if end != size:
            raise FileError(
                f"{path} has {size:,} bytes, and its header claims tensors up to {end:,}: it is "
                f"truncated or holds what nothing names; {_FETCH}"
            )
        return cls(path, {entry.name: entry for entry in found}, metadata)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own. Raises FileError when it is not there, and when it has
        no room: a file with holes can have terabytes."""
        import torch

        entry = self.entries.get(name)
        if entry is None:
            raise FileError(f"{self.path} has no tensor {name}")
        try:
            if entry.nbytes > LARGE and entry.nbytes > (free := virtual_memory().available):
                raise MemoryError(f"{free:,} are available")
            data = torch.empty(entry.nbytes, dtype=torch.uint8)
        except (MemoryError, RuntimeError) as error:
            raise FileError(
                f"{self.path}: no memory for {name}, which has {entry.nbytes:,} bytes: {error}"
            ) from error
        self.read_into(entry.start, memoryview(data.numpy()))
        # An empty tensor has no bytes to look at as another dtype.
        dtype = getattr(torch, DTYPES[entry.dtype][1])
        return data.view(dtype).reshape(entry.shape)

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fills `buffer` from byte `start` on; threads may. Raises FileError when the file ends
        before."""
        with self._opening:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], start + done)
            if count == 0:
                raise FileError(f"{self.path} became shorter while it was read; {_FETCH}")
            done += count

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@dataclass(frozen=True)
class SafeWeights:
    """All tensors of a directory: one file, or several with an index. A context manager."""

    directory: Path
    files: dict[str, SafeFile]  # {name of the file: file}, in the order of the names
    file_of: dict[str, SafeFile]  # {tensor: file}

    @classmethod
    def open(cls, directory: Path | str, stem: str = "model") -> SafeWeights:
        """`{stem}.safetensors.index.json` and the files that it names, or `{stem}.safetensors`.

        Raises FileError when there are none, for pickles in their place, for an index that names
        what is not there or not in the directory, for tensors that it does not name, and for two
        models in one directory.
        """
        directory = Path(directory)
        index = directory / f"{stem}.safetensors.index.json"
        if not index.exists():
            name = f"{stem}.safetensors"
            if not (directory / name).exists():
                raise FileError(_nothing_to_read(directory, name))
            file = SafeFile.open(inside(directory, name))
            return cls(directory, {name: file}, dict.fromkeys(file.entries, file))
        weight_map = read_json(inside(directory, index.name)).get("weight_map")
        if not _is_text_map(weight_map) or not weight_map:
            raise FileError(f"{index}: weight_map is no map of tensors to files; {_FETCH}")
        check_one_model(index, set(weight_map.values()))
        files = {}
        for name in sorted(set(weight_map.values())):
            path = inside(directory, name, named_by=index)
            if path.parent != directory or path.suffix != ".safetensors":
                raise FileError(
                    f"{index} names {name}, and only .safetensors files beside it are read"
                )
            files[name] = SafeFile.open(path)
        _check_index(index, weight_map, files)
        return cls(directory, files, {tensor: files[name] for tensor, name in weight_map.items()})

    def entries(self) -> Iterator[Entry]:
        for file in self.files.values():
            yield from file.entries.values()

    def entry(self, name: str) -> Entry:
        return self._file(name).entries[name]

    def read(self, name: str) -> torch.Tensor:
        return self._file(name).read(name)

    def _file(self, name: str) -> SafeFile:
        if name not in self.file_of:
            raise FileError(f"{self.directory} has no tensor {name}")
        return self.file_of[name]

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def __enter__(self) -> SafeWeights:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_one_model(index: Path, files: Collection[str]) -> None:
    """Raises FileError for `model.safetensors` beside an index of other `files`: which of the two
    is the model, each reader answers for itself."""
    single = index.with_name(index.name.removesuffix(".index.json"))
    if single.name not in files and single.exists():
        raise FileError(
            f"{single.parent} holds {single.name}, and {index.name} that does not name it: "
            "transformers and PEFT load the first, vLLM and lora-moe-rl the files of the second; "
            "remove the one that is not the model"
        )


def inside(directory: Path, name: str, named_by: Path | None = None) -> Path:
    """`directory / name`, which is a regular file of this directory or a link to one.

    A snapshot of the Hugging Face cache may link to the blobs of its own model. Raises FileError
    for an absolute name, `..`, a link that leaves the directory, and what is not there.
    """
    where = f"{named_by} names" if named_by else f"{directory} holds"
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
        raise FileError(f"{where} {name!r}, which is no name of a file in its own directory")
    path = directory / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError, UnicodeEncodeError):  # the last: a lone surrogate
        shown = name.encode(errors="backslashreplace").decode()
        raise FileError(f"{where} {shown}, which is not there; {_FETCH}") from None
    root = directory.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(one) for one in roots):
        raise FileError(
            f"{where} {name}, a link to {real} outside of it; put the file itself in its place"
        )
    if not stat.S_ISREG(real.stat().st_mode):
        raise FileError(f"{where} {name}, which is no regular file")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises FileError for anything else, and for a key that occurs twice."""
    with _open(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_JSON:
            raise FileError(f"{path} has {size:,} bytes, too many for a JSON file")
        return _json(file.read(), path)


def _open(path: Path):
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileError(f"{path} is no regular file")
        return open(path, "rb")
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error


def _json(data: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name, count in counts.items() if count > 1)
            raise FileError(f"{path} has {twice!r} twice; {_FETCH}")
        return result

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} is damaged, or no file of its kind: {error}; {_FETCH}") from error
    if not isinstance(value, dict):
        raise FileError(f"{path} holds no JSON object; {_FETCH}")
    return value


def _entry(path: Path, name: str, value: Any, first: int) -> Entry:
    """Raises FileError when dtype, shape and offsets are not what a header has, or do not agree."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise FileError(f"{path}: {name} has the dtype {dtype!r}, which is none of {known}")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise FileError(f"{path}: {name} has shape {shape} and offsets {offsets}; {_FETCH}")
    start, end = offsets
    expected = math.prod(shape) * DTYPES[dtype][0]
    if end - start != expected:
        raise FileError(
            f"{path}: {name} is {dtype} {shape}, which takes {expected:,} bytes, and its offsets "
            f"{offsets} hold {end - start:,}; {_FETCH}"
        )
    return Entry(name, dtype, tuple(shape), first + start, first + end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MOST_DIMENSIONS
        and all(type(one) is int and one >= 0 for one in value)
        and math.prod(one for one in value if one) < LARGEST
    )


def _is_text_map(value: Any) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _check_index(index: Path, weight_map: dict[str, str], files: dict[str, SafeFile]) -> None:
    for tensor, name in weight_map.items():
        if tensor not in files[name].entries:
            raise FileError(f"{index} says that {tensor} is in {name}, and it is not; {_FETCH}")
    for name, file in files.items():
        for tensor in file.entries:
            if weight_map.get(tensor) != name:
                raise FileError(
                    f"{name} holds {tensor}, which {index} does not name there; {_FETCH}"
                )


def _nothing_to_read(directory: Path, name: str) -> str:
    if not directory.is_dir():
        return f"{directory} is no directory"
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
    if pickles:
        return (
            f"{directory} holds {', '.join(pickles[:3])} and no {name}: pickles can run code and "
            "are not opened; convert them to safetensors where you trust them"
        )
    return f"{directory} holds no {name}"
