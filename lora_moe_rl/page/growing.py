"""A file of lines that a run may still be writing, read on from where it was left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class GrowingFile:
    """`read` yields the lines that are complete and have not been read yet.

    A run that is resumed puts a shorter file in the place of its old one (RunDir.rewind): then all
    is read anew, and `generation` has grown by one. What was made of the old lines is void.
    """

    def __init__(self, path: Path):
        self.path = path
        self.generation = 0
        self.offset = 0
        self._inode: int | None = None

    def refresh(self) -> bool:
        """Whether the file is another one than that read so far, or gone; it is begun anew then."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            inode, size = None, 0
        else:
            inode, size = found.st_ino, found.st_size
        another = inode != self._inode or size < self.offset
        if another:
            self._inode, self.offset = inode, 0
            self.generation += 1
        return another

    def read(self) -> Iterator[tuple[int, bytes]]:
        """(byte offset, line with its end) of each new line."""
        if self._inode is None:
            return
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                begin, self.offset = self.offset, self.offset + len(line)
                yield begin, line


class LinesByKey[K]:
    """Where the line of each key, as of a step, stands in a growing file; of two lines of a key,
    the later. `key_of` gives a line's key, None for a line that has none."""

    def __init__(self, path: Path, key_of: Callable[[bytes], K | None]):
        self.path, self._key_of = path, key_of
        self._file = GrowingFile(path)
        self.places: dict[K, tuple[int, int]] = {}

    def refresh(self) -> None:
        if self._file.refresh():
            self.places.clear()
        for offset, line in self._file.read():
            if (key := self._key_of(line)) is not None:
                self.places[key] = (offset, len(line))

    def read(self, key: K) -> dict[str, Any] | None:
        """The record of a key's line; None where there is no such line."""
        if (place := self.places.get(key)) is None:
            return None
        with open(self.path, "rb") as file:
            file.seek(place[0])
            return parse(file.read(place[1]))


# Made once: json.loads with an option makes a decoder for every line, which takes longer than to
# read most of them.
_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


def parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line. None for what is no JSON object; NaN and infinities are None."""
    try:
        record = _DECODER.decode(line.decode("utf-8", "surrogatepass"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
