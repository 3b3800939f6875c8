"""`lora-moe-rl bench overhead`: what a run's checks, copies and records take of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from lora_moe_rl.bench import report, step
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.bench.step import GROUP, PROMPTS, TOKENS
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import at_least, positive, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.telemetry.names import AUDITED, COPIES, PROOF_SECONDS, RECORDS, STEP_SECONDS
from lora_moe_rl.verify.report import table

ABOUT = """\
What the checks, copies and records of `bench step` take, as shares of a step. A check that is made
every so many steps is made in every second one here, and each such step compared with those before
and behind it; its share is of as many steps as it has by default. What is done in every step has a
clock of its own: the proof of each version, the copies that ranks leave, the files that are
written; of what is done beside other work that is the most that it can take.
"""
STEPS = 40
# By what is checked: the setting of how many steps lie between two checks, and the metric that is
# above 0 in a step with one.
AUDIT = "routes read back and compared"
IN_TURNS = {
    AUDIT: ("replay.audit", AUDITED),
    "slots of engines compared": ("refit.compare_every", "refit/compared"),
}
# By what is done in every step: the metric of its seconds.
CLOCKED = {
    "the proof of each version": PROOF_SECONDS,
    "copies of adapter and moments, for ranks that end": COPIES,
    "samples, order and loads on record": RECORDS,
}
ALL = "all together"
MOST = 0.05


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench overhead", ABOUT)
    parser.add_argument("--steps", type=at_least(3), default=STEPS, help=f"measured ({STEPS})")
    parser.add_argument("--prompts", type=positive, default=PROMPTS, help=f"of a step ({PROMPTS})")
    parser.add_argument("--tokens", type=positive, default=TOKENS, help=f"of each ({TOKENS})")
    parser.add_argument("--out", type=Path, help="a directory that keeps the runs")
    options = parser.parse_args(argv)
    busy = busy_cores()
    with contextlib.ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(temporary()))
        folder.mkdir(parents=True, exist_ok=True)
        work = step.Work(options.prompts, tokens=options.tokens)
        runs = Runs(folder, options.steps, work)
        found = measure(runs)
    result = {
        "steps": options.steps,
        "prompts": work.prompts,
        "response_tokens": work.tokens,
        "cores": cores(),
        "busy_cores_before": busy,
        **found,
        "goals": {"all together, of a step": goal(found["shares"][ALL], MOST)},
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


class Runs:
    """Runs of the same recipe with some settings otherwise, in a folder."""

    def __init__(self, folder: Path, steps: int, work: step.Work):
        self.folder, self.steps, self.work = folder, steps, work
        self.config = step.make_config(folder, steps, work)
        self.recipe = step.write_run(folder, self.config)

    def measured(self, name: str, *settings: str) -> list[dict[str, Any]]:
        """The records of the steps after those to warm up. Raises BenchmarkError for a run that
        was not right."""
        out = self.folder / name
        return step.run_measured(name, out, self.recipe, self.steps, settings, self.work)


def measure(runs: Runs) -> dict[str, Any]:
    """Shares of a step by what is checked or kept, and the seconds of a step."""
    made = {
        what: (runs.measured(key, f"{key}=2"), key, metric)
        for what, (key, metric) in IN_TURNS.items()
    }
    shares = {
        what: of_turns(records, metric) / default(runs.config, key)
        for what, (records, key, metric) in made.items()
    }
    records, _, _ = made[AUDIT]
    whole = seconds(records)
    shares |= {
        what: median(record[metric] for record in records) / whole
        for what, metric in CLOCKED.items()
    }
    return {"shares": shares | {ALL: sum(shares.values())}, "step_seconds": whole}


def default(config: RunConfig, key: str) -> int:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def seconds(records: Sequence[Mapping[str, Any]]) -> float:
    return median(record[STEP_SECONDS] for record in records)


def of_turns(records: Sequence[Mapping[str, Any]], metric: str) -> float:
    """The share of a step that is checked, where every second one is: each against the mean of its
    neighbours. Raises BenchmarkError where it is not every second one."""
    checked = [record.get(metric, 0) > 0 for record in records]
    if any(one == other for one, other in pairwise(checked)):
        raise BenchmarkError(f"{metric} is not above 0 in every second step: {checked}")
    spent = [record[STEP_SECONDS] for record in records]
    more = [
        spent[i] - (spent[i - 1] + spent[i + 1]) / 2 for i in range(1, len(spent) - 1) if checked[i]
    ]
    return median(more) / seconds(records)


def parts(result: Result) -> Iterable[Any]:
    yield (
        f"{result['steps']} steps of {result['step_seconds']:.3f} s: {result['prompts']} prompts x "
        f"{GROUP} samples x {result['response_tokens']} tokens, {result['cores']} cores"
    )
    shown = table(["", "of a step"])
    for what, share in result["shares"].items():
        shown.add_row(what, f"{share:+.2%}")
    yield shown
