"""Runs stages one after the other, each for a limited time in a session of its own.

    a stage's process writes DIR/NAME.json after each of its parts, and prints into DIR/NAME.log
    it ends, or its time is up ──> all that it has started is ended ──> DIR/results.json anew

Nothing that a stage does stops the next one. This file imports nothing heavy, and no CUDA.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lora_moe_rl.bench.gpu.parts import ENDS, errors, read_json, write_json
from lora_moe_rl.cluster.watchdog import marked
from lora_moe_rl.upstream.versions import importable

Outcome = dict[str, Any]
RESULTS = "results.json"
MARK = "LORA_MOE_RL_STAGE"
LEAST_S = 15.0  # a stage with less time than that would end before its imports
POLL_S = 0.2
GONE_S = 10.0  # in which processes that were killed have to be gone
PASSED, FAILED = "passed", "failed"
OUT_OF_TIME, NO_TIME_LEFT, LACKS = "out of time", "no time left", "lacks packages"


@dataclass(frozen=True)
class Job:
    """A stage. The path of the file for its parts is appended to `command`; `needs`: modules that
    must be installed."""

    name: str
    command: Sequence[str]
    limit_s: float
    needs: Sequence[str] = ()


def run_jobs(
    jobs: Sequence[Job],
    out: Path,
    budget_s: float,
    say: Callable[[str], None],
    env: Mapping[str, str] | None = None,
) -> dict[str, Outcome]:
    """The outcome of each job, by its name. Outcomes of other stages that `out` has already, from
    an earlier call, stay in its file."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + budget_s
    kept = read_json(out / RESULTS) or {}
    outcomes: dict[str, Outcome] = {}
    for job in jobs:
        say(f"{job.name} ...")
        outcomes[job.name] = _run(job, out, deadline - time.monotonic(), env or {})
        write_json(out / RESULTS, kept | outcomes)
        say(f"{job.name}: {outcomes[job.name]['status']}")
    return outcomes


def _run(job: Job, out: Path, left_s: float, env: Mapping[str, str]) -> Outcome:
    lacking = [name for name in job.needs if not importable(name)]
    if lacking:
        return {"status": f"{LACKS} {', '.join(lacking)}", "seconds": 0.0}
    if left_s < min(LEAST_S, job.limit_s):
        return {"status": NO_TIME_LEFT, "seconds": 0.0}
    file, log = out / f"{job.name}.json", out / f"{job.name}.log"
    file.unlink(missing_ok=True)
    limit_s = min(job.limit_s, left_s)
    started = time.monotonic()
    code, left_behind = _live(job, file, log, limit_s, env)
    outcome: Outcome = {
        "status": OUT_OF_TIME if code is None else PASSED if code == 0 else FAILED,
        "seconds": round(time.monotonic() - started, 2),
        "limit_s": round(limit_s, 1),
    }
    if left_behind:
        outcome["could_not_be_ended"] = left_behind
    return _with_parts(outcome, file, log)


def _live(
    job: Job, file: Path, log: Path, limit_s: float, env: Mapping[str, str]
) -> tuple[int | None, list[str]]:
    """A stage's process from its start to its end: its exit code, None when its time was up; and
    what of it is still there."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, **env, MARK: mark, ENDS: str(time.monotonic() + limit_s)}
    deadline = time.monotonic() + limit_s
    seen: set[psutil.Process] = set()
    try:
        process = _start([*job.command, str(file)], log, environment)
        seen.add(process)
        while (code := process.poll()) is None and time.monotonic() < deadline:
            with suppress(psutil.Error):
                seen.update(process.children(recursive=True))
            time.sleep(POLL_S)
    finally:  # Ctrl-C, too, ends the stage, also one that was just being started
        rest = _end(seen, mark)
    return code, rest


def _start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> psutil.Popen:
    with open(log, "wb") as output:
        return psutil.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )


def _end(seen: set[psutil.Process], mark: str) -> list[str]:
    """Ends all that a stage has started: its session, what was seen to come of it, and whatever
    has its mark. Returns what does not end: a process inside the driver cannot be killed."""
    deadline = time.monotonic() + GONE_S
    sessions = [one for one in seen if isinstance(one, psutil.Popen)]
    while True:
        for one in sessions:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(one.pid, signal.SIGKILL)
            one.poll()  # reaps it
        alive = [p for p in {*seen, *marked(MARK, mark)} if _alive(p)]
        if not alive or time.monotonic() > deadline:
            return [f"{p.pid} {_words(p)}" for p in alive]
        for one in alive:
            with suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(alive, timeout=1.0)


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _words(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())[:80]
    return ""


def _with_parts(outcome: Outcome, file: Path, log: Path) -> Outcome:
    """The outcome with what the stage has written, and, when it did not pass, with what went
    wrong."""
    parts = read_json(file)
    if parts is None:
        if outcome["status"] == PASSED:
            outcome["status"] = FAILED
        outcome["error"] = f"{file.name} is not there, or not JSON; {_last_line(log)}"
        return outcome
    if wrong := errors(parts):
        outcome["error"] = "; ".join(f"{name}: {error}" for name, error in wrong.items())
    elif outcome["status"] == FAILED:
        outcome["error"] = _last_line(log)
    return outcome | {"parts": parts}


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it printed nothing"
