"""`lora-moe-rl bench algorithms`: every algorithm trains the same recipe, beside each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from lora_moe_rl.bench import report
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal
from lora_moe_rl.config.options import names, positive, result_parser
from lora_moe_rl.config.plugins import ALGORITHMS
from lora_moe_rl.errors import BenchmarkError, ConfigError
from lora_moe_rl.files.run_dir import read_jsonl
from lora_moe_rl.telemetry.names import REWARD, STEP_SECONDS

ABOUT = """\
Trains a recipe once with each algorithm, one run after the other, and compares how far the reward
rises and what a step takes. Each run has a directory of its own below --out; one that is whole
there already is read and not run again. Draws rewards.png. Settings are those of `train`, for all
runs; unless they say otherwise a critic learns alone for five of the steps, and VAPO's lambda is
made for short answers (algorithm.length_alpha=2).
"""
RECIPE = Path(__file__).parents[2] / "recipes/tiny_arithmetic.py"
STEPS, COMPARED, WINDOW = 40, 5, 5
# For all that have the setting. VAPO's published length_alpha makes lambda 0 for up to 20 tokens,
# and an answer here has three: a lambda of 0.83.
SHORT = {"critic_warmup": 5, "length_alpha": 2.0}
LEAST_GAIN = 0.2
LAST_LINES = 5


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    wanted = names(options.algorithms, "--algorithms", "an algorithm")
    for name in wanted:
        ALGORITHMS.find(name)
    if not options.recipe.is_file():
        raise ConfigError(f"--recipe {options.recipe} is no file; name a recipe of a clone")
    options.out.mkdir(parents=True, exist_ok=True)
    busy = busy_cores()
    curves = {
        name: run(
            name, options.out / _folder(name), options.recipe, options.steps, options.settings
        )
        for name in wanted
    }
    draw(curves, options.out / "rewards.png")
    result = {
        "recipe": str(options.recipe),
        "steps": options.steps,
        "cores": cores(),
        "busy_cores_before": busy,
        "picture": str(options.out / "rewards.png"),
        **compare(curves),
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def run(
    name: str, folder: Path, recipe: Path, steps: int, settings: Sequence[str]
) -> list[dict[str, Any]]:
    """The records of a run with this algorithm; what it says goes to stderr. Raises BenchmarkError
    when it does not come to its end."""
    if not (found := _records(folder, steps)):
        command = [sys.executable, "-m", "lora_moe_rl", "train", str(recipe)]
        command += [f"algorithm.name={name}", f"trainer.steps={steps}", *_short(name), *settings]
        command += [f"logging.run_dir={folder}"]
        done = subprocess.run(command, stdout=sys.stderr)
        if done.returncode or not (found := _records(folder, steps)):
            raise BenchmarkError(
                f"{name} ended with exit code {done.returncode} before step {steps}; what it said "
                f"is above, its logs are in {folder}/logs. Runs that are whole are kept"
            )
    return found


def _short(name: str) -> list[str]:
    """What short runs on short answers have to have otherwise than it is set."""
    algorithm = ALGORITHMS.find(name)
    fields = algorithm.read({"name": name}).model_dump()
    return [f"algorithm.{key}={value}" for key, value in SHORT.items() if key in fields]


def compare(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Result:
    """By algorithm: the mean reward of the first and the last steps, and the median step. The goal
    is a reward that rises by LEAST_GAIN."""
    rows = {name: _summary(records) for name, records in curves.items()}
    gains = {f"{n}: reward gained": goal(r["gain"], LEAST_GAIN, True) for n, r in rows.items()}
    return {"algorithms": rows, "goals": gains}


def parts(result: Result) -> Iterable[Any]:
    from lora_moe_rl.verify.report import table

    yield f"{result['recipe']}, {result['steps']} steps each, {result['cores']} cores"
    first, rows = f"steps 1-{COMPARED}", result["algorithms"]
    shown = table(
        ["", f"reward, {first}", f"the last {COMPARED}", "gained", "step s", "over first"]
    )
    base = next(iter(rows.values()))["step_seconds"]
    for name, row in rows.items():
        cells = (f"{row[key]:.3f}" for key in ("first", "last", "gain", "step_seconds"))
        shown.add_row(name, *cells, f"{row['step_seconds'] / base:.2f}")
    yield shown
    yield result["picture"]


def draw(curves: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Rewards by step, each the mean of WINDOW steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, (name, records) in enumerate(curves.items()):
        rewards = [record[REWARD] for record in records]
        smooth = [mean(rewards[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rewards))]
        style = ("-", "--", ":")[number // 10 % 3]
        axes.plot([record["step"] for record in records], smooth, style, label=name)
    axes.set(xlabel="step", ylabel=f"reward, mean of {WINDOW} steps")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _records(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Of a run that is whole; else none."""
    file = folder / "metrics.jsonl"
    records = list(read_jsonl(file)) if file.exists() else []
    return records if [record["step"] for record in records] == list(range(1, steps + 1)) else []


def _summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    first, last = records[:COMPARED], records[-COMPARED:]
    start, end = (mean(record[REWARD] for record in some) for some in (first, last))
    seconds = median(record[STEP_SECONDS] for record in records)
    return {"first": start, "last": end, "gain": end - start, "step_seconds": seconds}


def _folder(name: str) -> str:
    """`my.py:BestOf` has a directory of its class's name."""
    return name.rpartition(":")[2]


def _parser():
    parser = result_parser("bench algorithms", ABOUT)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as trainer.lr=1e-3")
    parser.add_argument(
        "--algorithms",
        default=",".join(ALGORITHMS.names()),
        help="names or file.py:Class, with commas (all presets)",
    )
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="recipes/tiny_arithmetic.py")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"of each run ({STEPS})")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"), help="runs/algorithms")
    return parser
