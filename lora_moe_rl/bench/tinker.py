"""`lora-moe-rl bench tinker`: the work of `bench step` by a loop of Tinker's SDK, and by a run."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from lora_moe_rl.bench import report, step, tinker_loop
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.bench.tinker_loop import Loop, Taken
from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.upstream.versions import importable
from lora_moe_rl.verify.report import table

ABOUT = """\
The steps of `bench step`, once by `lora-moe-rl train` and once by a client of `lora-moe-rl tinker`
on this machine, whose loop samples, learns and takes a new sampler with Tinker's SDK: the same
model, prompts and sizes, one rank, one engine. Then how requests grow: samples of more prompts at a
time, and more data in one forward_backward. A token whose routes are not replayed, or whose
logprobs differ, and nothing is reported.
"""
STEPS = 20
# What a run calls it, of what a client waits for.
STAGES = {"sample": ("rollout",), "learn": ("train",), "publish": ("refit",)}
RATIO = 1.5  # of a run's step
GROWTH = 1.5  # seconds of one of the most, over those of one of the fewest
START_S, END_S = 600.0, 120.0


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    if not importable("tinker"):
        raise BenchmarkError("Tinker's SDK is not installed here: pip install tinker==0.38.0")
    busy = busy_cores()
    with temporary() as path:
        folder = Path(path)
        recipe = step.write_run(folder, step.make_config(folder, options.steps))
        records = step.run_measured("the run", folder / "run", recipe, options.steps)
        with served(recipe, folder) as url:
            taken, growth = tinker_loop.measure(url, step.WARMUP, options.steps)
    result = {
        "steps": options.steps,
        "cores": cores(),
        "busy_cores_before": busy,
        **figures(step.summary(records)["seconds"], taken, growth),
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


@contextmanager
def served(recipe: Path, folder: Path) -> Iterator[str]:
    """The address of a service, as long as the context lasts; what it says goes to stderr. Raises
    BenchmarkError when it does not start."""
    command = [sys.executable, "-m", "lora_moe_rl", "tinker", str(recipe), "--port", "0"]
    command += ["--dir", str(folder / "service"), "refit.slots=3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _address(process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stderr.write(line)
        if match := re.search(r"TINKER_BASE_URL=(\S+)", line):
            return match[1]
    raise BenchmarkError(f"the service ended with exit code {process.wait()} before it listened")


def figures(run: dict[str, float], taken: Sequence[Loop], growth: dict[str, list[Taken]]) -> Result:
    """`run`: median seconds by stage."""
    seconds = {stage: median(getattr(one, stage) for one in taken) for stage in STAGES}
    seconds["step"] = median(one.whole for one in taken)
    ratio = seconds["step"] / run["step"]
    grown = {name: found[-1].of_one / found[0].of_one for name, found in growth.items()}
    return {
        "seconds": seconds,
        "of_the_run": {stage: sum(run[name] for name in names) for stage, names in STAGES.items()}
        | {"step": run["step"]},
        "ratio": ratio,
        "growth": {name: [one._asdict() for one in found] for name, found in growth.items()},
        "goals": {
            "a step, over that of a run": goal(ratio, RATIO),
        }
        | {
            f"one of {name} of the most, over one of the fewest": goal(value, GROWTH)
            for name, value in grown.items()
        },
    }


def parts(result: Result) -> Iterable[Any]:
    yield (
        f"{step.PROMPTS} prompts x {step.GROUP} samples x {step.TOKENS} tokens, LoRA rank "
        f"{step.RANK}, {result['cores']} cores"
    )
    shown = table(["seconds", "run", "client", "client / run"], f"median of {result['steps']}")
    for stage, seconds in result["seconds"].items():
        run = result["of_the_run"][stage]
        shown.add_row(stage, f"{run:.3f}", f"{seconds:.3f}", f"{seconds / run:.2f}")
    yield shown
    for name, found in result["growth"].items():
        shown = table([name, "seconds", "ms each"])
        for one in found:
            each = 1000 * one["seconds"] / one["number"]
            shown.add_row(f"{one['number']:,}", f"{one['seconds']:.2f}", f"{each:.2f}")
        yield shown


def _parser():
    parser = result_parser("bench tinker", ABOUT)
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"measured ({STEPS})")
    return parser
