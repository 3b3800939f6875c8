"""Whether bytes are the same: of a tensor and the checkpoint's, of a file and what was written."""

from __future__ import annotations

import mmap

import torch
import xxhash

from lora_moe_rl.errors import HeldBaseError
from lora_moe_rl.refit.merged_base import Base

BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def check_same(path: str, held: torch.Tensor, read: torch.Tensor) -> None:
    """Raises HeldBaseError unless what is held is what the checkpoint has, bit for bit."""
    bits = BITS[held.element_size()]
    if held.shape != read.shape or not torch.equal(
        held.contiguous().view(bits), read.contiguous().view(bits)
    ):
        raise HeldBaseError(
            f"{path}: the checkpoint has other values than are held for trainer and engines; set "
            "model.held_once=off"
        )


def put(path: str, out: torch.Tensor, read: torch.Tensor) -> None:
    """Copies what was read, in the dtype of `out`, and compares what then stands there. Raises
    HeldBaseError when it is not the same."""
    out.copy_(read)
    check_same(path, out, read.to(out.device, out.dtype))


def checksum(memory: mmap.mmap, first: int, nbytes: int) -> str:
    """xxh3-128 of a range of bytes, as hexadecimal digits."""
    with memoryview(memory) as whole, whole[first : first + nbytes] as part:
        return xxhash.xxh3_128_hexdigest(part)


def state_of_files(base: Base) -> str:
    """Another one whenever a weight file of the checkpoint has been written or replaced, however
    its time of modification was set: of each the device, inode, size and times of modification
    and of change, which the kernel alone sets."""
    found = xxhash.xxh3_128()
    for name, file in sorted(base.weights.files.items()):
        stat = file.path.stat()
        times = stat.st_mtime_ns, stat.st_ctime_ns
        found.update(repr((name, stat.st_dev, stat.st_ino, stat.st_size, *times)).encode())
    return found.hexdigest()
