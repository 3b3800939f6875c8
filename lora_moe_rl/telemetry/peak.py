"""The memory that this process holds, in GiB: of a trainer rank, of an engine's worker.

The most of it: on a GPU what torch had allocated there at its most since `begin`; the CUDA context
and what the allocator keeps in reserve are not in it. On the CPU the most that was resident of the
process since it began, libraries included: the kernel does not count by the step.
"""

from __future__ import annotations

import resource
from pathlib import Path

import torch

GIB = 2**30


def begin() -> None:
    """Counts a GPU's peak anew from here on."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def gib() -> float:
    """Since `begin` on a GPU, in the process's life on the CPU: beside a GPU, too, of which torch's
    optimizers ask something at each step, and where such a process allocates nothing."""
    allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    return (allocated or _resident_peak()) / GIB


def now() -> float:
    """The memory in use: on a GPU by all its processes, on the CPU what is resident of this
    process."""
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / GIB


def _resident_peak() -> int:
    """Bytes. VmHWM is of this program alone; ru_maxrss, where the kernel has no VmHWM, may be that
    of the process it was forked from (proc_pid_status(5), getrusage(2))."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
