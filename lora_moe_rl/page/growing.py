"""A file of lines that a run may still be writing, read on from where it was left."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
