"""`lora-moe-rl bench algorithms`: every algorithm trains the same recipe, beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from lora_moe_rl.bench import report
from lora_moe_rl.bench.recipe_run import RECIPE, run
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal
from lora_moe_rl.config import AlgorithmConfig
from lora_moe_rl.config.options import names, positive, result_parser
from lora_moe_rl.config.plugins import ALGORITHMS
from lora_moe_rl.config.teacher import SelfTeacherSettings, TeacherSettings
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.names import REWARD, STEP_SECONDS

ABOUT = """\
Trains a recipe once with each algorithm, one run after the other, and compares how far the reward
rises and what a step takes. Each run has a directory of its own below --out; one that is whole
there already is read and not run again. Draws rewards.png. Settings are those of `train`, for all
runs; unless they say otherwise a critic learns alone for five of the steps, and VAPO's lambda is
made for short answers (algorithm.length_alpha=2). Algorithms that have a teacher (opd,
distillation) are there with --teacher-url, the server's address up to and with /v1, and
--teacher-model, its name there; the recipe's reward then teaches nothing and shows how they fare.
One whose policy is its own teacher (sdpo) is there when it is named: it has to read solutions,
which tiny models cannot.
"""
STEPS, COMPARED, WINDOW = 40, 5, 5
# For all that have the setting. VAPO's published length_alpha makes lambda 0 for up to 20 tokens,
# and an answer here has three: a lambda of 0.83.
SHORT = {"critic_warmup": 5, "length_alpha": 2.0}
LEAST_GAIN = 0.2


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    teacher = _teacher(options.teacher_url, options.teacher_model)
    wanted = presets(with_teacher=bool(teacher))
    if options.algorithms is not None:
        wanted = names(options.algorithms, "--algorithms", "an algorithm")
    _check_teacher(wanted, teacher)
    if not options.recipe.is_file():
        raise ConfigError(f"--recipe {options.recipe} is no file; name a recipe of a clone")
    options.out.mkdir(parents=True, exist_ok=True)
    busy = busy_cores()
    curves = {
        name: run(
            name,
            options.out / _folder(name),
            options.recipe,
            options.steps,
            [f"algorithm.name={name}", *_own(name, teacher), *options.settings],
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


def _own(name: str, teacher: Sequence[str]) -> list[str]:
    """What short runs on short answers have to have otherwise than it is set, and its teacher."""
    fields = _settings(name).model_dump()
    short = [f"algorithm.{key}={value}" for key, value in SHORT.items() if key in fields]
    return [*short, *(teacher if _has_teacher(name) else ())]


def _teacher(url: str | None, model: str | None) -> list[str]:
    """The settings of a teacher, if there is one. Raises ConfigError for half of one."""
    if (url is None) != (model is None):
        raise ConfigError("--teacher-url and --teacher-model go together: set both, or neither")
    return (
        [] if url is None else [f"algorithm.teacher_url={url}", f"algorithm.teacher_model={model}"]
    )


def _check_teacher(wanted: Sequence[str], teacher: Sequence[str]) -> None:
    """Raises ConfigError for an algorithm that is not there, one whose teacher is missing, and a
    teacher that none of them has."""
    taught = [name for name in wanted if _has_teacher(name)]
    if taught and not teacher:
        raise ConfigError(
            f"--algorithms: {', '.join(taught)} learns from a teacher; name its server by "
            "--teacher-url and --teacher-model (docs/algorithms.md)"
        )
    if teacher and not taught:
        raise ConfigError(
            f"--teacher-url has no effect: none of {', '.join(wanted)} learns from a teacher"
        )


def compare(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> Result:
    """What each algorithm came to: the mean reward of the first and the last steps, and the median
    step. The goal is a reward that rises by LEAST_GAIN."""
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


def _summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    first, last = records[:COMPARED], records[-COMPARED:]
    start, end = (mean(record[REWARD] for record in some) for some in (first, last))
    seconds = median(record[STEP_SECONDS] for record in records)
    return {"first": start, "last": end, "gain": end - start, "step_seconds": seconds}


def _has_teacher(name: str) -> bool:
    return isinstance(_settings(name), TeacherSettings)


def _settings(name: str) -> AlgorithmConfig:
    return ALGORITHMS.find(name).read({"name": name})


def _folder(name: str) -> str:
    """`my.py:BestOf` has a directory of its class's name."""
    return name.rpartition(":")[2]


def presets(with_teacher: bool = False) -> list[str]:
    """Those whose rewards can be compared: all that learn from rollouts; those that learn from a
    teacher if there is one. None that is its own: a tiny model cannot read a solution."""
    found = [n for n in ALGORITHMS.names() if ALGORITHMS.find(n).learns_from == "rollouts"]
    found = [name for name in found if not isinstance(_settings(name), SelfTeacherSettings)]
    return [name for name in found if with_teacher or not _has_teacher(name)]


def _parser():
    parser = result_parser("bench algorithms", ABOUT)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as trainer.lr=1e-3")
    parser.add_argument(
        "--algorithms",
        help="names or file.py:Class, with commas (all that learn from rollouts; those with a "
        "teacher if one is named)",
    )
    parser.add_argument("--teacher-url", help="server of a teacher: http://HOST:PORT/v1 (none)")
    parser.add_argument("--teacher-model", help="its name there")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="recipes/tiny_arithmetic.py")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"of each run ({STEPS})")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"), help="runs/algorithms")
    return parser
