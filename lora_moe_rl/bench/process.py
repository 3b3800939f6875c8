"""What Linux says of this process, and the page cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lora_moe_rl.errors import BenchmarkError


def status_bytes(key: str) -> int:
    """A size of /proc/self/status, as VmHWM, the peak of what is resident (getrusage would tell
    that of the parent if it was higher). Raises BenchmarkError where it is not told."""
    return 1024 * _number("/proc/self/status", key)


def disk_bytes() -> int:
    """Read from the disk for this process so far. Raises BenchmarkError where that is not told."""
    return _number("/proc/self/io", "read_bytes")


def _number(path: str, key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+)", Path(path).read_text(), re.MULTILINE)
    if match is None:
        raise BenchmarkError(f"{path} does not tell {key}: run this on Linux")
    return int(match[1])


def to_disk(folder: Path, forget: bool = False) -> None:
    """Writes all files of a folder to the disk; with `forget`, drops them from the page cache, so
    that reading them is reading from the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            if forget:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def private_bytes(pid: int) -> int:
    """Memory of a process that belongs to no file: its proportional share."""
    return 1024 * _number(f"/proc/{pid}/smaps_rollup", "Pss_Anon")


def held_bytes(pid: int) -> int:
    """All memory of a process, its proportional share of what others have too; 0 of one that has
    ended."""
    try:
        return 1024 * _number(f"/proc/{pid}/smaps_rollup", "Pss")
    except OSError:
        return 0


def mapped_bytes(pid: int, path: Path) -> int:
    """A process's share of what is resident (PSS) of a file that several processes map."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(f" {path}")
        elif ours and line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])
    return total
