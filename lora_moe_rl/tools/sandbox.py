"""Runs a model's Python code, in a process of its own or in a container, under limits.

    sandbox = Sandbox(wall_s=5, memory_mb=256)
    sandbox.run("print(1 + 1)").text         2

This keeps honest mistakes, and code that a model writes by chance, from the run. It is not a wall
against who means harm: the kernel is the run's own, and a hole in it is a way out. What holds
differs by machine: `Sandbox.held` says it, and with `must_hold` it is an error where something does
not.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from lora_moe_rl.calls.ending import MARK, folder_prefix
from lora_moe_rl.cluster.process_end import signal_name
from lora_moe_rl.cluster.watchdog import KILL_S, kill_marked
from lora_moe_rl.errors import ConfigError

CHILD = Path(__file__).with_name("sandbox_child.py")
WORK = "/work"  # where code is told that it is
OF_ONE = "LORA_MOE_RL_SANDBOX"  # beside the mark of who has called: what one call has started
KEPT = ("PATH", "LANG", "LC_ALL", MARK, OF_ONE)  # of the environment of the run
STOP_S = 60.0  # in which an engine has to have stopped a container
# Runs its arguments when its input ends, however that comes about.
AT_THE_END = 'read -r _; exec "$@" >/dev/null 2>&1 </dev/null'
HOLDS = ("network", "processes", "files", "user")
Engine = Literal["docker", "podman"]


@dataclass(frozen=True)
class Limits:
    """`cpu_s` and `memory_mb` are of each process, `processes` counts threads too; `disk_mb` and
    `num_files` are of what the code writes, `num_open` of files open in a process."""

    wall_s: float = 10.0
    cpu_s: int = 10
    memory_mb: int = 512
    output_bytes: int = 20_000
    processes: int = 32
    disk_mb: int = 64
    num_files: int = 256
    num_open: int = 64


@dataclass(frozen=True)
class Ran:
    """What the code wrote, as text; and how it ended, '' when it came to its end by itself. `held`:
    what of HOLDS did."""

    output: str
    ended: str
    held: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What the model is told of it."""
        parts = [self.output.rstrip("\n")] if self.output else []
        return "\n".join(parts + ([f"[{self.ended}]"] if self.ended else [])) or "[no output]"


class Sandbox:
    """`container`: an engine to run `image` by, instead of a process. `must_hold`: what of HOLDS
    has to. Raises ConfigError for an engine without a daemon, an image that is not there, a limit
    that there is not, and for what has to hold and does not."""

    def __init__(
        self,
        container: Engine | None = None,
        image: str = "python:3.12-slim",
        must_hold: tuple[str, ...] = (),
        **limits: Any,
    ):
        if wrong := [name for name in limits if name not in Limits.__dataclass_fields__]:
            there = ", ".join(Limits.__dataclass_fields__)
            raise ConfigError(f"a sandbox has no limit {', '.join(wrong)}; it has {there}")
        if wrong := [name for name in must_hold if name not in HOLDS]:
            raise ConfigError(f"must_hold={', '.join(wrong)} is none of {', '.join(HOLDS)}")
        self.limits, self.container, self.image = Limits(**limits), container, image
        if container is not None:
            _require_container(container, image)
        elif must_hold:
            missing = [name for name in must_hold if name not in self.held]
            if missing:
                raise ConfigError(
                    f"a sandbox on this machine does not hold {', '.join(missing)} (must_hold): "
                    "its kernel or its container refuses namespaces; use container=docker or "
                    "podman, or leave it out of must_hold"
                )

    @property
    def held(self) -> tuple[str, ...]:
        """What of HOLDS does, by trying; all of it in a container."""
        return HOLDS if self.container else self.run("").held

    def run(self, code: str) -> Ran:
        """Runs Python code until it ends, or a limit ends it."""
        prefix = folder_prefix("sandbox")
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
            if self.container is not None:
                name = f"lora-moe-rl-{uuid.uuid4().hex}"
                command = container_command(self.container, self.image, name, self.limits)
                with _stopping([self.container, "kill", name]):
                    return _watched(command, code, self.limits, folder, contained=True)
            limits = asdict(self.limits) | {"keep": KEPT, "parent": os.getpid()}
            command = [sys.executable, "-I", "-S", str(CHILD), "FD", json.dumps(limits)]
            return _watched(command, code, self.limits, folder)


def container_command(engine: str, image: str, name: str, limits: Limits) -> list[str]:
    """What runs code from its standard input in a container that has no network, no rights, and one
    folder to write in, which is in memory."""
    mega = f"{limits.memory_mb}m"
    return [
        engine, "run", "--rm", "-i", "--name", name, "--pull", "never", "--network", "none",
        "--memory", mega, "--memory-swap", mega, "--cpus", "1",
        "--pids-limit", str(limits.processes), "--read-only",
        "--tmpfs", f"{WORK}:size={limits.disk_mb}m,nr_inodes={limits.num_files},mode=1777",
        "--workdir", WORK, "--user", "65534:65534", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges", "--ulimit", f"cpu={limits.cpu_s}",
        "--ulimit", f"nofile={limits.num_open}", "--ulimit", "core=0",
        image, "python", "-I", "-u", "-",
    ]  # fmt: skip


def _require_container(engine: str, image: str) -> None:
    if engine not in ("docker", "podman"):
        raise ConfigError(f"container={engine!r} is none of docker, podman")
    if shutil.which(engine) is None:
        raise ConfigError(f"container={engine}: there is no program {engine}; install it, or leave "
                          "container out, which runs code in a process")  # fmt: skip
    for asked, told in (
        (["info"], f"container={engine}: its daemon does not answer"),
        (["image", "inspect", image], f"image={image} is not here: {engine} pull {image}"),
    ):
        found = subprocess.run([engine, *asked], capture_output=True, text=True, timeout=60)
        if found.returncode:
            last = (found.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise ConfigError(f"{told} ({last})")


@contextmanager
def _stopping(command: list[str]) -> Iterator[None]:
    """Runs the command at the end, also when that is this process's: a container is the engine's
    child, and would go on."""
    # Without the marks by which all else is found and killed at that time.
    env = {name: value for name, value in os.environ.items() if not name.startswith("LORA_MOE_RL_")}
    watching = subprocess.Popen(
        ["/bin/sh", "-c", AT_THE_END, "sh", *command], env=env,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    assert watching.stdin is not None
    try:
        yield
    finally:
        watching.stdin.close()
        try:
            watching.wait(STOP_S)
        except subprocess.TimeoutExpired:
            watching.kill()
            raise


def _watched(
    command: list[str], code: str, limits: Limits, folder: str, contained: bool = False
) -> Ran:
    """Runs a command on `code`, and ends it with all that it has started."""
    read_told, write_told = os.pipe()
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [str(write_told) if word == "FD" else word for word in command],
        cwd=folder, pass_fds=(write_told,), env={**os.environ, OF_ONE: mark},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    os.close(write_told)
    try:
        output, ended = _output_of(process, code.encode("utf-8", "replace"), limits)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # then it is named by what follows
            process.wait(KILL_S)
        kill_marked(OF_ONE, mark)
        told = _told(read_told)
    if contained:
        code_of, held = process.returncode, HOLDS
    else:
        code_of, held = told.get("code"), tuple(told.get("held", ()))
        # Equal code says the same each time, and in a container.
        output = output.replace(os.path.realpath(folder), WORK).replace(folder, WORK)
    return Ran(output, ended or _how(code_of, told.get("cpu_s", 0.0), limits), held)


def _output_of(process: subprocess.Popen, code: bytes, limits: Limits) -> tuple[str, str]:
    """What it wrote until it ended, and which limit it reached, if it did."""
    assert process.stdin is not None and process.stdout is not None
    deadline, found, ended = time.monotonic() + limits.wall_s, bytearray(), ""
    with selectors.DefaultSelector() as selector, process.stdout, process.stdin:
        os.set_blocking(process.stdin.fileno(), False)  # who reads it may be slow to, or never
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while not ended:
            left = deadline - time.monotonic()
            if left <= 0:
                ended = f"ended: it took longer than wall_s={limits.wall_s:g}"
                continue
            ready = [key.fileobj for key, _ in selector.select(left)]
            if process.stdin in ready and not (code := _without_sent(code, process.stdin)):
                selector.unregister(process.stdin)
                process.stdin.close()
            if process.stdout in ready:
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    break
                found += part
                if len(found) > limits.output_bytes:
                    ended = f"ended: it wrote more than output_bytes={limits.output_bytes}"
        if not ended:  # it may have closed its output and go on
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                ended = f"ended: it took longer than wall_s={limits.wall_s:g}"
    return bytes(found[: limits.output_bytes]).decode("utf-8", "replace"), ended


def _without_sent(code: bytes, pipe: IO[bytes]) -> bytes:
    """What is left to be sent after a try; nothing where nobody reads it any more."""
    try:
        return code[os.write(pipe.fileno(), code) :]
    except BlockingIOError:
        return code
    except BrokenPipeError:
        return b""


def _told(descriptor: int) -> dict[str, Any]:
    """What the child said of itself: what held, and how the code ended."""
    found: dict[str, Any] = {}
    with os.fdopen(descriptor, "rb") as file:
        for line in file:
            found |= json.loads(line)
    return found


def _how(code: int | None, cpu_s: float, limits: Limits) -> str:
    if code == 0:
        return ""
    if code is None:
        return "ended before it began"
    if cpu_s >= limits.cpu_s - 0.5 and code < 0:
        return f"ended: it used more than cpu_s={limits.cpu_s} of a processor"
    return f"ended by {signal_name(-code)}" if code < 0 else f"exit code {code}"
