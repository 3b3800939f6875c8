"""Runs code under limits, as a program of its own: `python -I -S sandbox_child.py FD LIMITS <CODE`.

    this process      leaves the network, other processes and writable files behind, as far as the
      │               kernel lets it, and says on FD what it could
      └─ the first    of the new process namespace: when it ends, the kernel ends all others there
           └─ python  the code, as another user, with rlimits and an almost empty environment

It imports nothing but the standard library, and nothing of this project.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

SPACES = os.CLONE_NEWNET | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWNS
MS_BIND, MS_REC_PRIVATE = 0x1000, 0x4000 | 0x40000
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1
SET_SECUREBITS, NO_ROOT, SET_NO_NEW_PRIVILEGES = 28, 3, 38
SET_PDEATHSIG = 1
NOBODY, FIRST_OWN = 65534, 200_000  # user numbers; from the second on each process gets its own
LIBC = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> None:
    told, limits = int(argv[0]), json.loads(argv[1])
    code = sys.stdin.buffer.read()
    held, python = isolate(limits)
    end_with_parent()
    if os.getppid() != limits["parent"]:
        os._exit(1)  # it has ended already
    os.write(told, json.dumps({"held": held}).encode() + b"\n")
    with open("main.py", "wb") as file:
        file.write(code)
    first = os.fork()
    if first:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    end_with_parent()
    child = os.fork()
    if not child:
        os.close(told)
        begin(limits, python)
    _, status, usage = os.wait4(child, 0)
    ended = {"code": os.waitstatus_to_exitcode(status), "cpu_s": usage.ru_utime + usage.ru_stime}
    os.write(told, json.dumps(ended).encode() + b"\n")
    os._exit(0)


def end_with_parent() -> None:
    """The kernel ends this process when its parent ends, however that comes about. Whoever becomes
    another user, or forks, has to ask for it anew."""
    LIBC.prctl(SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def isolate(limits: dict[str, Any]) -> tuple[list[str], str]:
    """Leaves behind what it can. Returns what holds: `network` (there is none), `processes` (none
    outlives the code), `files` (all are read-only but for its own folder, which is in memory and
    bounded), `user` (it is another one than the run's); and where Python is now."""
    held, root, user = [], os.geteuid() == 0, FIRST_OWN + os.getpid()
    python = os.path.realpath(sys.executable)
    inside = False
    if root:
        inside = _done(lambda: os.unshare(SPACES))
        if not inside and _open_to_all(python) and _become(user):
            held.append("user")
    if not inside:
        uid, gid = os.geteuid(), os.getegid()
        inside = _done(lambda: os.unshare(os.CLONE_NEWUSER | SPACES)) and _map(uid, gid)
    if inside:
        held += ["network", "processes"]
        owner = user if root and "user" not in held else os.geteuid()
        if _hide_files(limits, owner):
            held.append("files")
            os.chdir(os.getcwd())  # into the folder that is mounted there now
            if root and not _open_to_all(python):
                python = _lent(python)
    if root and "user" not in held and _open_to_all(python) and _become(user):
        held.append("user")
    return held, python


def _open_to_all(path: str) -> bool:
    """Whether any user may use what is there; what lies in the home of root, none may."""
    while path != (above := os.path.dirname(path)):
        if not os.stat(path).st_mode & 1:
            return False
        path = above
    return True


def _lent(python: str) -> str:
    """Python at a place that any user comes to, in the working folder; where it was if that cannot
    be."""
    place, inner = os.path.join(os.getcwd(), ".python"), os.path.relpath(python, sys.base_prefix)
    os.mkdir(place)
    lent = _mount(sys.base_prefix.encode(), place.encode(), None, MS_BIND)
    return os.path.join(place, inner) if lent else python


def _hide_files(limits: dict[str, Any], owner: int) -> bool:
    """All that is mounted becomes read-only, and the working folder one in memory."""
    if not _mount(b"none", b"/", None, MS_REC_PRIVATE):
        return False
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    sealed = LIBC.syscall(
        MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, ctypes.sizeof(attributes)
    )
    # Of this namespace alone; where the kernel refuses that, the old one shows numbers of others.
    _mount(b"proc", b"/proc", b"proc", 0)
    how = f"size={limits['disk_mb']}m,nr_inodes={limits['num_files']},mode=0711,uid={owner}"
    own = _mount(b"tmpfs", os.getcwd().encode(), b"tmpfs", 0, how.encode())
    return sealed == 0 and own


def _mount(
    source: bytes, target: bytes, kind: bytes | None, flags: int, how: bytes | None = None
) -> bool:
    return LIBC.mount(source, target, kind, ctypes.c_ulong(flags), how) == 0


def _map(uid: int, gid: int) -> bool:
    """The user is the same in the new namespace, so that it owns what it owned, and no more."""

    def write() -> None:
        for name, text in (
            ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"),
        ):  # fmt: skip
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)

    return _done(write)


def _become(user: int) -> bool:
    """Another user for ever, one that nobody else is, or else nobody; who owns the folder then."""

    def become(number: int) -> None:
        os.chown(".", number, number)
        os.setgroups([])
        os.setresgid(number, number, number)
        os.setresuid(number, number, number)

    return _done(lambda: become(user)) or _done(lambda: become(NOBODY))


def _done(step: Callable[[], Any]) -> bool:
    try:
        step()
    except OSError:
        return False
    return True


def begin(limits: dict[str, Any], python: str) -> None:
    """Becomes the code, run by the Python of that path, without packages."""
    mega = 1 << 20
    for what, most in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_mb"] * mega),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] * mega),
        (resource.RLIMIT_NOFILE, limits["num_open"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (bound, bound))
    LIBC.prctl(SET_SECUREBITS, NO_ROOT, 0, 0, 0)  # whoever is root in a namespace has no rights
    LIBC.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    end_with_parent()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(1, 2)
    environment = {name: os.environ[name] for name in limits["keep"] if name in os.environ}
    environment |= {"HOME": os.getcwd(), "TMPDIR": os.getcwd(), "PYTHONDONTWRITEBYTECODE": "1"}
    if python != os.path.realpath(sys.executable):  # what it links to may be named by its old place
        environment["LD_LIBRARY_PATH"] = os.path.join(os.path.dirname(python), "..", "lib")
    os.execve(python, [python, "-I", "-S", "-u", "main.py"], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
