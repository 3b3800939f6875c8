"""A run of the command line as a user starts it, and every process that it starts in turn."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from lora_moe_rl.chaos.child import alive
from lora_moe_rl.files.jsonl import read_jsonl

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/tiny_arithmetic.py"
POLL_S = 0.1
START_S = 400  # longest wait for the first step, on a busy machine


class CliRun:
    """`lora-moe-rl ARGUMENTS`, with a process group of its own, as a terminal gives it."""

    def __init__(self, *arguments: object, output: Path, ray_address: str | None = None):
        """`ray_address`: of a cluster to join; by default the run starts Ray itself."""
        self.output_file = output
        environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        if ray_address is not None:
            environment["RAY_ADDRESS"] = ray_address
            environment.setdefault("RAY_AUTH_MODE", "disabled")  # as the cluster's
        command = [sys.executable, "-m", "lora_moe_rl", *map(str, arguments)]
        with open(output, "w") as file:
            self.process = psutil.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=ROOT,
                env=environment,
            )
        self.seen: set[psutil.Process] = set()

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def wait_for(self, condition: Callable[[], object], what: str, timeout: float = START_S):
        """What `condition` returns once it is true, while the run goes on."""
        deadline = time.monotonic() + timeout
        while not (result := condition()):
            assert self._running(), f"the run ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} in {timeout} s:\n{self.output}"
            time.sleep(POLL_S)
        self._running()
        return result

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda: text in self.output, f"{text!r} on the console")

    def finish(self, timeout: float = START_S) -> int:
        """The exit code, when the run ends by itself."""
        deadline = time.monotonic() + timeout
        while self._running():
            assert time.monotonic() < deadline, f"still running after {timeout} s:\n{self.output}"
            time.sleep(POLL_S)
        return self.process.wait()

    def interrupt(self) -> None:
        """Ctrl-C: a terminal sends it to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def actor(self, name: str, title: str) -> psutil.Process | None:
        """The process that writes the log of the actor `name` and whose command line matches the
        regular expression `title`."""
        for process in self.process.children(recursive=True):
            try:
                log = os.readlink(f"/proc/{process.pid}/fd/1")
                if log.endswith(f"/{name}.log") and re.search(title, " ".join(process.cmdline())):
                    return process
            except (OSError, psutil.Error):
                continue
        return None

    def leftovers(self, timeout: float = 20) -> list[str]:
        """Processes of this run that are still there some seconds after its end."""
        _, rest = psutil.wait_procs([p for p in self.seen if alive(p)], timeout)
        return [f"{p.pid} {' '.join(p.cmdline())[:80]}" for p in rest if alive(p)]

    def end(self) -> None:
        """Ends everything that is still there: the test has failed."""
        self._running()
        for process in [self.process, *self.seen]:
            if alive(process):
                process.kill()

    def _running(self) -> bool:
        """Whether the run goes on; notes which processes there are."""
        try:
            self.seen.update(self.process.children(recursive=True))
        except psutil.NoSuchProcess:
            return False
        return self.process.poll() is None


def trained(folder: Path, *arguments: object) -> list[dict]:
    """The records of metrics.jsonl of a run in `folder` that ends well."""
    run = CliRun(
        "train", *arguments, f"logging.run_dir={folder}", output=folder.with_suffix(".out")
    )
    try:
        assert run.finish() == 0, run.output
    finally:
        run.end()
    return list(read_jsonl(folder / "metrics.jsonl"))
