"""How often the kernel has killed a process because memory ran out.

Linux counts it: `oom_kill` in memory.events of a control group (v2), in memory.oom_control (v1),
and in /proc/vmstat for the machine (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst).
It does not say whom without the kernel's log, which few may read.
"""

from __future__ import annotations

from pathlib import Path

COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
MACHINE = "/proc/vmstat"


def kills(counters: tuple[str, ...] = (*COUNTERS, MACHINE)) -> int:
    """How many processes the kernel has killed for lack of memory, by the first of the files that
    counts them: those of our container, where there is one, else of the machine. 0 where nothing
    counts."""
    for path in counters:
        try:
            rows = (line.split() for line in Path(path).read_text().splitlines())
            return next(int(row[1]) for row in rows if len(row) == 2 and row[0] == "oom_kill")
        except (OSError, ValueError, StopIteration):
            continue
    return 0


def sentence(before: int, now: int) -> str:
    """What to say of a process that was killed, if the kernel killed any while it lived; else ''.
    Both are counts of `kills`."""
    if now <= before:
        return ""
    number = now - before
    return (
        f", and while it lived the kernel's OOM killer ended {number} "
        f"process{'es' * (number > 1)}: memory ran out"
    )
