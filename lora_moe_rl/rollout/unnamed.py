"""Shared memory and sockets of an engine's processes, without names.

vLLM's processes of one engine speak through files in /dev/shm where a model is cut over several of
them (`vllm/distributed/device_communicators/shm_broadcast.py`, `cpu_communicator.py`), and remove
these when they are shut down. The actors of a run are killed, at its end too, and every such engine
would leave its files behind: 8 MiB a run with rollout.tp=2 on a CPU; and the sockets that they
listen on, which are called by UUIDs in the folder for temporary files. Ranks on an engine's further
nodes are told when all have met (`cluster/spread_actor.py`).

    a name, while others come to open it ──> all have it open ──> no name: it goes with the last
                                                                  process that has it open
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

PLACE = Path("/dev/shm")
# What Python's multiprocessing and vLLM's C code call them. Others have files there as well.
PYTHONS = "psm_"
PREFIXES = (PYTHONS, "vllm_dist_")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def forget_names() -> list[str]:
    """Removes the names of what this process and those below it have open: called when all of an
    engine's processes have started. Returns the names."""
    me = psutil.Process()
    all_of_it = me, *me.children(recursive=True)
    found = {path for one in all_of_it for path in (*_mapped(one.pid), *_sockets(one))}
    for path in found:
        path.unlink(missing_ok=True)
        if path.name.startswith(PYTHONS):  # whose tracker would miss it, and say so on stderr
            resource_tracker.unregister(f"/{path.name}", "shared_memory")
    return sorted(path.name for path in found)


def _mapped(pid: int) -> Iterator[Path]:
    """Files of PLACE that a process has in its memory and that still have a name."""
    with suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, slash, name = line.partition(f" {PLACE}/")
            if slash and name.startswith(PREFIXES) and not name.endswith(" (deleted)"):
                yield PLACE / name


def _sockets(process: psutil.Process) -> Iterator[Path]:
    """Sockets of vLLM's that a process listens on, that still have a name, and that somebody has
    connected to."""
    folder = Path(os.environ.get("VLLM_RPC_BASE_PATH") or tempfile.gettempdir())
    with suppress(psutil.Error):  # it has ended
        # What listens, and each connection to it, has the same address.
        found = Counter(str(one.laddr) for one in process.net_connections("unix"))
        for path in (Path(address) for address, count in found.items() if count > 1):
            if path.parent == folder and UUID.fullmatch(path.name) and path.is_socket():
                yield path
