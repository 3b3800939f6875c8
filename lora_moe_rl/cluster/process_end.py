"""How a process of this machine that is not our child has ended.

Only a process's parent is told that, and the parent of an actor is Ray, which does not say. Linux
tells whoever holds a pidfd too, from 6.15 on (PIDFD_GET_INFO in include/uapi/linux/pidfd.h).
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import time
import weakref
from contextlib import suppress

import psutil

from lora_moe_rl.cluster import oom_killer

_INFO = struct.Struct("=QQ12I")  # mask, cgroup, ten ids, ..., exit code
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_EXIT = 1 << 3
PATIENCE_S = 1.0  # until its parent has taken note


def signal_name(number: int) -> str:
    """The name of a signal, as `SIGKILL`; most real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


class Watched:
    """The process `pid`, which must be alive. Raises OSError or psutil.Error when it is not.

    Its descriptor is closed when nothing refers to this any more: whoever waited for an actor that
    was ended may still ask how."""

    def __init__(self, pid: int):
        self._descriptor = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self._descriptor)
        self._kills = oom_killer.kills()
        self._process = psutil.Process(pid)

    def how_it_ended(self) -> str | None:
        """`signal SIGKILL`, and whether memory may be why; `exit code 1`; or None when it lives or
        the kernel does not tell."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            asked = bytearray(_INFO.pack(_EXIT, *[0] * 13))
            try:
                fcntl.ioctl(self._descriptor, _GET_INFO, asked)
            except OSError:  # an older kernel; or it has ended, and its parent does not know yet
                asked = bytearray(_INFO.size)
            mask, *_, status = _INFO.unpack(asked)
            if mask & _EXIT:
                code = os.waitstatus_to_exitcode(status)
                if code >= 0:
                    return f"exit code {code}"
                memory = ""
                if -code == signal.SIGKILL:
                    memory = oom_killer.sentence(self._kills, oom_killer.kills())
                return f"signal {signal_name(-code)}{memory}"
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)

    def kill(self) -> None:
        """Ends it at once and what it has started, also when they are stopped. Harmless when it has
        ended."""
        with suppress(psutil.Error):
            for child in self._process.children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
