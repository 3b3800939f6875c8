"""`lora-moe-rl bench async`: the same work with rollouts ahead of training, and without."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from lora_moe_rl.bench import report, step
from lora_moe_rl.bench.recipe_run import run
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal
from lora_moe_rl.config.options import names, positive, result_parser
from lora_moe_rl.errors import BenchmarkError, ConfigError
from lora_moe_rl.telemetry.names import COVERAGE, IDLE_ENGINES, IDLE_TRAINER, STEP_SECONDS, TOKENS
from lora_moe_rl.verify.report import table

ABOUT = """\
Trains the model of `bench step` with schedule.lag=0, 1 and 4, one run after the other, on two kinds
of work: responses of equal length, and one prompt in eight with responses that are sixteen times
longer. Compares samples a second of whole steps, after some to warm up; who waited, and how old the
tokens were; and what the simulation of `plan --run` says of each run, from its own stages and from
those of lag 0. Each run has a directory of its own below --out; one that is whole there already is
read and not run again. Settings are those of `train`, for all runs.
"""
LAGS, STEPS, WARMUP = "0,1,4", 16, 6
SHORT, LONG, ONE_IN = 16, 256, 8
WORKS = {"equal": SHORT, "mixed": LONG}  # the longest response of each kind of work
# By kind of work and lag: samples a second over those of lag 0, at least.
LEAST = {("equal", "1"): 1.4, ("mixed", "4"): 2.0}
MOST_OFF = 0.15  # of a simulated step
AGE = "rollout/age_mean"
MAX_KL = 1e-6  # of tokens of the version that is updated


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    lags = names(options.lags, "--lags", "a lag")
    if not all(lag.isdecimal() for lag in lags):
        raise ConfigError(f"--lags {options.lags}: a lag is a whole number of steps")
    works = names(options.works, "--works", "a kind of work", list(WORKS))
    options.out.mkdir(parents=True, exist_ok=True)
    busy, runs = busy_cores(), {}
    for work in works:
        for lag in lags:
            records = measure(options.out, work, int(lag), options.steps, options.settings)
            runs[work, lag] = summary(records[WARMUP:])
        for lag in lags:
            runs[work, lag] |= simulations(options.out, work, lag, "0" in lags)
    result = {
        "prompts": step.PROMPTS,
        "samples_per_prompt": step.GROUP,
        "steps": options.steps,
        "cores": cores(),
        "busy_cores_before": busy,
        **compare(runs),
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def measure(
    folder: Path, work: str, lag: int, steps: int, settings: Sequence[str]
) -> list[Mapping[str, Any]]:
    """The records of a run. Raises BenchmarkError when it did other work, or trained on tokens that
    are not its own policy's."""
    from lora_moe_rl.bench.model import make_model
    from lora_moe_rl.config.files import to_yaml

    if not (folder / "model").exists():
        make_model(folder / "model")
    data = folder / f"{work}.jsonl"
    write_rows(data, WORKS[work], (WARMUP + steps + lag + 1) * step.PROMPTS)
    recipe = folder / "recipe.yaml"
    recipe.write_text(to_yaml(step.make_config(folder, steps)))
    asked = [f"data.path={data}", f"rollout.max_response_tokens={WORKS[work]}"]
    asked += ["environment.name=lora_moe_rl.bench.mixed_lengths:MixedLengths"]
    asked += [f"schedule.lag={lag}", f"refit.slots={lag + 2}"]
    asked += ["algorithm.correction=tis"] if lag else []
    records = run(
        f"{work}, lag {lag}",
        run_dir(folder, work, lag),
        recipe,
        WARMUP + steps,
        [*asked, *settings],
    )
    if faults := _faults(records, work):
        raise BenchmarkError(f"{work}, lag {lag}: no rate to report: " + "; ".join(faults))
    return records


def run_dir(folder: Path, work: str, lag: int | str) -> Path:
    return folder / f"{work}-{lag}"


def write_rows(path: Path, longest: int, count: int) -> None:
    """Prompts, each with how many tokens its responses have."""
    from lora_moe_rl.tiny.arithmetic import problems

    with path.open("w") as file:
        for number, (prompt, _) in enumerate(islice(problems(0), count)):
            tokens = SHORT if number % ONE_IN else longest
            file.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")


def _faults(records: Sequence[Mapping[str, Any]], work: str) -> list[str]:
    found = []
    expected = step.GROUP * step.PROMPTS * (SHORT * (ONE_IN - 1) + WORKS[work]) / ONE_IN
    tokens = mean(record[TOKENS] for record in records)
    if abs(tokens - expected) > expected / 2:
        found.append(f"{tokens:.0f} tokens a step, not about {expected:.0f}")
    for record in records:
        if record[COVERAGE] != 1:
            found.append(f"step {record['step']}: {COVERAGE} is {record[COVERAGE]}, not 1")
        kl = record.get("mismatch/kl_age_0", record.get("mismatch/kl"))
        if kl is not None and kl > MAX_KL:
            found.append(f"step {record['step']}: mismatch of its own tokens is {kl:.1e}")
    return found


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Samples and tokens a second over all steps, and means over them."""
    seconds = sum(record[STEP_SECONDS] for record in records)
    return {
        "samples_per_second": step.GROUP * step.PROMPTS * len(records) / seconds,
        "tokens_per_second": sum(record[TOKENS] for record in records) / seconds,
        "idle_trainer": mean(record[IDLE_TRAINER] for record in records),
        "idle_engines": mean(record[IDLE_ENGINES] for record in records),
        "age": mean(record[AGE] for record in records),
    }


def simulations(folder: Path, work: str, lag: str, from_lag_0: bool) -> dict[str, float]:
    """Samples a second as `plan --run` simulates them, of the steps that it looks at."""
    from lora_moe_rl.planner import ahead

    measured = ahead.measure(run_dir(folder, work, lag))
    layout = measured.config.trainer.world_size, measured.config.rollout.engines
    own = ahead.simulated(measured, int(lag), *layout)
    found = {"simulated": own.samples_per_s, "simulated_off": own.step_s / measured.step_s - 1}
    if from_lag_0:
        before = ahead.measure(run_dir(folder, work, 0))
        predicted = ahead.simulated(before, int(lag), *layout)
        found["predicted_off"] = predicted.step_s / measured.step_s - 1
    return found


def compare(runs: Mapping[tuple[str, str], dict[str, float]]) -> Result:
    goals, rows = {}, {}
    for (work, lag), row in runs.items():
        rows[f"{work}, lag {lag}"] = row
        name = f"{work}, lag {lag}: simulated step against measured"
        goals[name] = goal(abs(row["simulated_off"]), MOST_OFF)
        if (work, "0") not in runs or lag == "0":
            continue
        row["over_lag_0"] = row["samples_per_second"] / runs[work, "0"]["samples_per_second"]
        if (work, lag) in LEAST:
            goals[f"{work}, lag {lag}: samples a second over lag 0"] = goal(
                row["over_lag_0"], LEAST[work, lag], at_least=True
            )
    return {"runs": rows, "goals": goals}


def parts(result: Result) -> Iterable[Any]:
    yield (
        f"{result['prompts']} prompts x {result['samples_per_prompt']} samples of {SHORT} tokens "
        f"(mixed: one prompt in {ONE_IN} of {LONG}), {result['steps']} steps, {result['cores']} "
        "cores"
    )
    heads = ["", "samples/s", "over lag 0", "tokens/s", "trainer idle", "engines idle", "mean age"]
    heads += ["simulated", "from lag 0"]
    shown = table(heads)
    for name, row in result["runs"].items():
        shown.add_row(
            name,
            f"{row['samples_per_second']:.1f}",
            f"{row['over_lag_0']:.2f}" if "over_lag_0" in row else "",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['idle_trainer']:.0%}",
            f"{row['idle_engines']:.0%}",
            f"{row['age']:.2f}",
            f"{row['simulated_off']:+.0%}",
            f"{row['predicted_off']:+.0%}" if "predicted_off" in row else "",
        )
    yield shown


def _parser():
    parser = result_parser("bench async", ABOUT)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as rollout.engines=2")
    parser.add_argument("--lags", default=LAGS, help=f"with commas ({LAGS})")
    parser.add_argument("--works", default=",".join(WORKS), help=f"of {', '.join(WORKS)} (all)")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"measured ({STEPS})")
    parser.add_argument("--out", type=Path, default=Path("runs/async"), help="runs/async")
    return parser
