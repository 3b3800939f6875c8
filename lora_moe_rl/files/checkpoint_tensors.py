"""The adapter in a checkpoint, tensor by tensor: more than one is in memory only where somebody
keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from lora_moe_rl.adapters.served import served
from lora_moe_rl.adapters.shards import Shard, assemble
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.files.checkpoint_contents import slice_of
from lora_moe_rl.files.trainer_state import files
from lora_moe_rl.files.untrusted import Entry, SafeFile

MOST_OPEN = 64  # files at once; there is one for each rank


class CheckpointTensors(Mapping[str, np.ndarray]):
    """Canonical tensors of the policy as they are served, float32, each read and put together when
    it is asked for. A context manager, which closes the files.

    Raises AdapterError for a tensor that is not whole or not finite.
    """

    def __init__(self, directory: Path, spec: AdapterSpec):
        self.spec, self.shapes = spec, spec.tensor_shapes
        self._places: dict[str, list[tuple[SafeFile, Entry, tuple[int, ...]]]] = {}
        for path in files(directory):
            file = SafeFile.open(path)
            for entry in file.entries.values():
                kind, name, start = slice_of(entry)
                if kind == "adapter":
                    self._places.setdefault(name, []).append((file, entry, start))
        self._open: dict[Path, SafeFile] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        shards = [
            Shard(name, start, self._read(file, entry))
            for file, entry, start in self._places.get(name, ())
        ]
        whole = assemble({name: self.shapes[name]}, shards)[name]
        return served(self.spec, name, whole)

    def _read(self, file: SafeFile, entry: Entry) -> np.ndarray:
        if file.path not in self._open and len(self._open) >= MOST_OPEN:
            self.close()
        self._open[file.path] = file
        data = np.empty(entry.nbytes, np.uint8)
        file.read_into(entry.start, memoryview(data))
        return data.view(np.float32).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
