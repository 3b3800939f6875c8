"""`lora-moe-rl bench gpu`: all that wants a GPU, in stages, each for a limited time.

Nothing that a stage does stops the next one. DIR/results.json has the outcome of each, and is
written anew after each; DIR/NAME.json what a stage has found so far, and DIR/NAME.log what it
printed. A later call with the same DIR replaces the stages that it names.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.bench.gpu import runner
from lora_moe_rl.bench.gpu.runner import Job, Outcome
from lora_moe_rl.bench.gpu.stages import STAGES
from lora_moe_rl.bench.report import conclude
from lora_moe_rl.config.options import names, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.run.signals import interrupts

BUDGET_S = 1800.0
CPU_PATIENCE = 3  # a dry run may take so many times as long as a GPU
# Nothing is fetched: what is not on the machine fails at once, and is not waited for.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def main(argv: Sequence[str]) -> int:
    """Returns 1 unless every stage that was asked for has passed. Raises ConfigError for a stage
    that is none, and BenchmarkError for a device that is not here."""
    rows = "\n".join(f"    {name:<13} {stage.shows}" for name, stage in STAGES.items())
    parser = result_parser("bench gpu", f"{__doc__}\nstages, in this order:\n\n{rows}")
    parser.add_argument("--stages", metavar="A,B", help="only these, in the order above")
    parser.add_argument("--out", type=Path, metavar="DIR", help="by default runs/gpu/DATE-TIME")
    parser.add_argument(
        "--budget", type=_seconds, default=BUDGET_S, metavar="SECONDS",
        help=f"for all stages together ({BUDGET_S:g})",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu: a dry run with small sizes, whose figures say nothing of a GPU",
    )  # fmt: skip
    options = parser.parse_args(argv)
    wanted = list(STAGES)
    if options.stages is not None:
        asked = names(options.stages, "--stages", "a stage", list(STAGES))
        wanted = [name for name in STAGES if name in asked]
    _require(options.device)
    out = options.out or Path("runs/gpu") / time.strftime("%Y%m%d-%H%M%S")
    say = _quiet if options.json else print
    jobs = [_job(name, options.device) for name in wanted]
    with interrupts():  # the stage that runs is ended with this process
        outcomes = runner.run_jobs(jobs, out, options.budget, say, ENVIRONMENT)
    conclude({"device": options.device, "out": str(out), "stages": outcomes}, options.json, parts)
    return int(any(outcome["status"] != runner.PASSED for outcome in outcomes.values()))


def parts(result: dict[str, Any]) -> Iterator[Any]:
    """What is printed of the outcomes: a table, and what went wrong."""
    from lora_moe_rl.verify.report import table

    rows = table(["stage", "seconds", "", "parts"], left=(0, 2, 3))
    outcomes: dict[str, Outcome] = result["stages"]
    for name, outcome in outcomes.items():
        made = ", ".join(outcome.get("parts", {}))
        rows.add_row(name, f"{outcome['seconds']:.1f}", outcome["status"], made)
    yield rows
    for name, outcome in outcomes.items():
        if "error" in outcome:
            yield f"{name}: {outcome['error'][:1000]}"
        for process in outcome.get("could_not_be_ended", ()):
            yield f"{name}: could not be ended: {process}"
    yield f"{result['out']}/{runner.RESULTS}"


def _job(name: str, device: str) -> Job:
    command = (sys.executable, "-m", "lora_moe_rl.bench.gpu.child", name, device)
    limit_s = STAGES[name].limit_s * (CPU_PATIENCE if device == "cpu" else 1)
    return Job(name, command, limit_s, STAGES[name].needs)


def _require(device: str) -> None:
    """Asks the driver's library: torch takes seconds to import, and may be what is broken."""
    if device == "cpu":
        return
    import ctypes

    try:
        found = ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    except OSError:
        found = False
    if not found:
        raise BenchmarkError(
            "the driver finds no GPU here; --device cpu runs every stage with small sizes"
        )


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ArgumentTypeError(f"{text} is not above 0")
    return value


def _quiet(line: str) -> None:
    pass
