"""`lora-moe-rl bench start`: from the command line to the first step."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from lora_moe_rl.bench import report
from lora_moe_rl.bench.recipe_run import RECIPE
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.files.jsonl import tail
from lora_moe_rl.upstream import doctor
from lora_moe_rl.verify.report import table

ABOUT = """\
Starts the demo, with its model made, and tells after how many seconds what was there; and how many
seconds of a core each of its processes has used by the end of the first step. Medians over the
rounds. `key=value` are settings of `train`.
"""
ROUNDS, POLL_S, PATIENCE_S, LINES = 3, 0.02, 900.0, 15
MOST_S = 15.0
CONSOLE = "console.txt"
CONTROLLER, OTHERS = "the run itself", "Ray and others"
# What is there by then, and a file that shows it: from when it exists, or has the text.
STAGES = {
    "settings read, imports of the run": ("run/config.yaml", ""),
    "Ray, the first actor": ("run/logs/trainer-0.log", ""),
    "trainer ranks and engines": (CONSOLE, "engine-0: "),
    "the first step": ("run/metrics.jsonl", "\n"),
}
TOTAL = list(STAGES)[-1]


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench start", ABOUT)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as rollout.engines=2")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help=f"({ROUNDS})")
    options = parser.parse_intermixed_args(argv)
    from lora_moe_rl.models.directory import resolve_model

    resolve_model("qwen3_moe")
    busy = busy_cores()
    with temporary() as folder:
        found = [
            measure(Path(folder) / str(number), options.settings)
            for number in range(options.rounds)
        ]
    at = {stage: median(one[stage] for one, _ in found) for stage in STAGES}
    used = {who: median(one[who] for _, one in found) for who in found[0][1]}
    result = {
        "rounds": options.rounds,
        "settings": options.settings,
        "cores": cores(),
        "busy_cores_before": busy,
        "seconds": at,
        "core_seconds": used,
        "uncompiled": doctor.uncompiled() if sys.dont_write_bytecode else [],
        "goals": {"seconds to the first step": goal(at[TOTAL], MOST_S)},
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def measure(folder: Path, settings: Sequence[str]) -> tuple[dict[str, float], Counter[str]]:
    """Seconds until each stage, and seconds of a core by process. Raises BenchmarkError when the
    run ends before its first step."""
    folder.mkdir()
    command = [sys.executable, "-m", "lora_moe_rl", "train", str(RECIPE), "trainer.steps=1000"]
    command += [*settings, f"logging.run_dir={folder / 'run'}"]
    began = time.perf_counter()
    with open(folder / CONSOLE, "wb") as console:
        process = subprocess.Popen(command, stdout=console, stderr=console)
    try:
        at = {stage: _seen(process, folder, *shown) - began for stage, shown in STAGES.items()}
        return at, core_seconds(process.pid)
    finally:
        _end(process)


def _seen(process: subprocess.Popen, folder: Path, file: str, text: str) -> float:
    """When the file was there, with the text."""
    path, deadline = folder / file, time.perf_counter() + PATIENCE_S
    while not (path.exists() and text in path.read_text(errors="replace")):
        if process.poll() is not None or time.perf_counter() > deadline:
            said = tail(folder / CONSOLE, LINES)
            raise BenchmarkError(f"the run has not come to its first step; it said\n{said}")
        time.sleep(POLL_S)
    return time.perf_counter()


def core_seconds(pid: int) -> Counter[str]:
    """The processor seconds of a run's processes that are there, by whose log they write."""
    root = psutil.Process(pid)
    used: Counter[str] = Counter({CONTROLLER: _used(root)})
    for child in root.children(recursive=True):
        with contextlib.suppress(OSError, psutil.Error):
            log = Path(os.readlink(f"/proc/{child.pid}/fd/1"))
            actor = log.parent.name == "logs" and log.suffix == ".log" and log.stem[-1:].isdigit()
            used[log.stem if actor else OTHERS] += _used(child)
    return used


def _used(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _end(process: subprocess.Popen) -> None:
    children = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=20)


def parts(result: Result) -> Iterable[Any]:
    settings = ", ".join(["", *result["settings"]])
    yield f"the demo, rounds: {result['rounds']}, {result['cores']} cores{settings}"
    at = table(["", "seconds"])
    for stage, seconds in result["seconds"].items():
        at.add_row(stage, f"{seconds:.1f}")
    yield at
    if uncompiled := result["uncompiled"]:
        yield doctor.check_bytecode(uncompiled, written=False).mend
    used = table(["by the first step", "seconds of a core"])
    for who, seconds in sorted(result["core_seconds"].items()):
        used.add_row(who, f"{seconds:.1f}")
    used.add_row("all", f"{sum(result['core_seconds'].values()):.1f}")
    yield used
