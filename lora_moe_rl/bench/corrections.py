"""`lora-moe-rl bench corrections`: what corrections buy when samples are older than the policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any

from lora_moe_rl.bench import report
from lora_moe_rl.bench.algorithms import COMPARED, STEPS, WINDOW
from lora_moe_rl.bench.recipe_run import RECIPE, run
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal
from lora_moe_rl.config.options import names, positive, result_parser
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.names import MISMATCH_KL, REWARD, kl_of_age

ABOUT = """\
Trains a recipe with samples that are up to --lag steps old, with each correction between the policy
that sampled and the one that learns, with routes replayed and without, once a seed; and
synchronously, which is what they are held against. Each run has a directory of its own below --out;
one that is whole there already is read and not run again. Draws rewards.png. Settings are those of
`train`, for all runs.
"""
LAG = 3
SEEDS = "1,2,3"
CASES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "uncorrected": ("algorithm.correction=lora_moe_rl.bench.uncorrected:Uncorrected",),
    "tis": ("algorithm.correction=tis",),
    "icepop": ("algorithm.correction=icepop",),
    "anchor=rollout": ("algorithm.anchor=rollout",),
}
REPLAY = ("r3", "off")
UNBOUNDED = "mismatch.stop_above_old=1e6"
AGE = "rollout/age_mean"
# The mean reward of the last steps may be this much below the synchronous run's.
MOST_LOST = 0.05

Runs = dict[str, list[Sequence[Mapping[str, Any]]]]


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    wanted = names(options.cases, "--cases", "a case", list(CASES))
    seeds = names(options.seeds, "--seeds", "a seed")
    modes = names(options.replay, "--replay", "a mode", REPLAY)
    if not options.recipe.is_file():
        raise ConfigError(f"--recipe {options.recipe} is no file; name a recipe of a clone")
    options.out.mkdir(parents=True, exist_ok=True)
    busy = busy_cores()
    runs: Runs = {}
    for seed in seeds:  # so that a bench which is stopped has something of each case
        for case, replay in ((case, replay) for replay in modes for case in wanted):
            name = f"{case}, replay {replay}"
            folder = options.out / _folder(case, replay, options.lag, seed)
            asked = [*settings(case, replay, options.lag), f"seed={seed}", *options.settings]
            found = run(name, folder, options.recipe, options.steps, asked)
            runs.setdefault(name, []).append(found)
    draw(runs, options.out / "rewards.png")
    result = {
        "recipe": str(options.recipe),
        "steps": options.steps,
        "lag": options.lag,
        "seeds": seeds,
        "cores": cores(),
        "busy_cores_before": busy,
        "picture": str(options.out / "rewards.png"),
        **compare(runs),
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def settings(case: str, replay: str, lag: int) -> list[str]:
    """What a case sets; as many adapter slots as its lag wants, and no bound that would end a run
    for what is measured here."""
    found = [f"replay.mode={replay}", *CASES[case]]
    if case != "synchronous":
        found += [f"schedule.lag={lag}", f"refit.slots={lag + 2}", UNBOUNDED]
    return found


def compare(runs: Runs) -> Result:
    """What each case came to: the mean reward of the first and the last steps over all seeds and
    how far the seeds are apart, the mean age of tokens in versions, and by age in steps the KL of
    the policy that sampled them to the one that learns, before its update. The goal is that no
    correction loses more than MOST_LOST to the synchronous run with the same routes; what is lost
    without one has no goal."""
    rows = {name: _summary(of_seeds) for name, of_seeds in runs.items()}
    goals = {}
    for name, row in rows.items():
        case, _, replay = name.partition(", ")
        beside = rows.get(f"synchronous, {replay}")
        if beside is not None and case not in ("synchronous", "uncorrected"):
            lost = beside["last"] - row["last"]
            goals[f"{name}: reward lost to synchronous"] = goal(lost, MOST_LOST)
    return {"cases": rows, "goals": goals}


def parts(result: Result) -> Iterable[Any]:
    from lora_moe_rl.verify.report import table

    seeds = ", ".join(result["seeds"])
    yield f"{result['recipe']}, {result['steps']} steps, lag {result['lag']}, seeds {seeds}"
    last = f"the last {COMPARED}"
    ages = [f"KL, age {age}" for age in range(result["lag"] + 1)]
    heads = ["", "replay", f"steps 1-{COMPARED}", last, "seeds apart", "age", *ages]
    shown = table(heads, "reward")
    for name, row in result["cases"].items():
        rewards = (f"{row[key]:.3f}" for key in ("first", "last", "spread"))
        kl = [f"{value:.1e}" for value in row["kl"].values()]
        shown.add_row(
            *name.split(", replay "),
            *rewards,
            f"{row['age']:.2f}",
            *kl,
            *[""] * (len(ages) - len(kl)),
        )
    yield shown
    yield result["picture"]


def draw(runs: Runs, path: Path) -> None:
    """Rewards by step, each the mean of WINDOW steps, over the seeds; from the least seed to the
    best in a lighter shade."""
    import numpy as np
    from matplotlib.figure import Figure

    kinds = [replay for replay in REPLAY if any(name.endswith(replay) for name in runs)]
    figure = Figure(figsize=(6 * len(kinds), 4.5), layout="constrained")
    for axes, replay in zip(
        np.atleast_1d(figure.subplots(1, len(kinds), sharey=True)), kinds, strict=True
    ):
        for name, of_seeds in runs.items():
            case, _, its = name.partition(", replay ")
            if its != replay:
                continue
            rewards = np.array([[record[REWARD] for record in one] for one in of_seeds])
            smooth = np.stack(
                [rewards[:, max(0, i + 1 - WINDOW) : i + 1].mean(1) for i in range(len(rewards[0]))]
            )
            steps = [record["step"] for record in of_seeds[0]]
            (line,) = axes.plot(steps, smooth.mean(1), label=case)
            axes.fill_between(
                steps, smooth.min(1), smooth.max(1), alpha=0.15, color=line.get_color()
            )
        axes.set(xlabel="step", ylabel=f"reward, mean of {WINDOW} steps", title=f"replay {replay}")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _folder(case: str, replay: str, lag: int, seed: str) -> str:
    """A synchronous run is the same for all lags."""
    ahead = "" if case == "synchronous" else f"-lag{lag}"
    return f"{case.replace('=', '_')}{ahead}-{replay}-{seed}"


def _summary(of_seeds: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    records = [record for one in of_seeds for record in one]
    last = [mean(record[REWARD] for record in one[-COMPARED:]) for one in of_seeds]
    return {
        "first": mean(record[REWARD] for one in of_seeds for record in one[:COMPARED]),
        "last": mean(last),
        "spread": max(last) - min(last),
        "age": mean(record[AGE] for record in records),
        "kl": _kl_by_age(records),
    }


def _kl_by_age(records: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Mean over the steps that have tokens of that age; a synchronous run has only those of age
    0."""
    found: dict[int, float] = {}
    while (metric := kl_of_age(len(found))) in records[0]:
        values = [record[metric] for record in records if record[metric] is not None]
        found[len(found)] = mean(values) if values else nan
    return found or {0: mean(record[MISMATCH_KL] for record in records)}


def _parser():
    parser = result_parser("bench corrections", ABOUT)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as trainer.lr=3e-3")
    parser.add_argument("--cases", default=",".join(CASES), help="with commas (all)")
    parser.add_argument("--lag", type=positive, default=LAG, help=f"in steps ({LAG})")
    parser.add_argument("--replay", default=",".join(REPLAY), help="r3, off (both)")
    parser.add_argument("--seeds", default=SEEDS, help=f"with commas ({SEEDS})")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="recipes/tiny_arithmetic.py")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"of each run ({STEPS})")
    parser.add_argument("--out", type=Path, default=Path("runs/corrections"), help="a directory")
    return parser
