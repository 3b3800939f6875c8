"""What benchmarks share: a folder, a quiet machine, goals, and how figures are printed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.verify.report import console

BUSY = 0.2  # cores; more than that, used by others, and the figures are not to be trusted
Result = dict[str, Any]


def temporary(directory: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="lora-moe-rl-bench-", dir=directory)


def require_room(folder: str | Path, needed_gb: float, command: str, other: str) -> None:
    """Raises BenchmarkError where the disk of `folder` has less. `other`: how to name another."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < needed_gb:
        raise BenchmarkError(
            f"{command} takes {needed_gb:.0f} GB of {folder}'s disk, which has {free:.0f} GB free: "
            f"name another with {other}, or a smaller --gb"
        )


def busy_cores() -> float:
    """Cores that other programs use, over one second in which this one only waits."""
    return round(psutil.cpu_percent(interval=1.0) / 100 * (os.cpu_count() or 1), 2)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def disturbances(runs: Mapping[str, Result]) -> list[str]:
    """What other programs did just before each measurement, by its name; empty on a quiet
    machine."""
    return [
        f"just before{name and f' {name}'}, other programs kept {run['busy_cores_before']:.2f} "
        f"cores busy: measure again on a quiet machine"
        for name, run in runs.items()
        if run.get("busy_cores_before", 0) > BUSY
    ]


def goal(found: float, limit: float, at_least: bool = False) -> Result:
    met = found >= limit if at_least else found <= limit
    return {"found": found, "limit": limit, "at_least": at_least, "met": met}


def all_met(result: Result) -> bool:
    return all(goal["met"] for goal in result["goals"].values())


def conclude(
    result: Result,
    as_json: bool,
    parts: Callable[[Result], Iterable[Any]],
    runs: Callable[[Result], Mapping[str, Result]] = lambda result: {"": result},
) -> None:
    """Prints the figures: one JSON object, or the texts and tables of `parts`, the goals, and what
    disturbed the `runs`."""
    if as_json:
        print(json.dumps(result, indent=1))
        return
    out = console()
    for part in parts(result):
        out.print(part)
    for name, goal in result.get("goals", {}).items():
        sign = "at least" if goal["at_least"] else "at most"
        verdict = "[green]met[/]" if goal["met"] else "[bold red]missed[/]"
        out.print(f"{name}: {goal['found']:.3g}, {sign} {goal['limit']:g}: {verdict}")
    for line in disturbances(runs(result)):
        out.print(line, style="yellow")
