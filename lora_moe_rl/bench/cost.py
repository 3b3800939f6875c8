"""`lora-moe-rl bench cost`: what a step takes with other algorithms, of the same work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lora_moe_rl import algorithms
from lora_moe_rl.bench import report, step
from lora_moe_rl.bench.recipe_run import run
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import names, positive, result_parser
from lora_moe_rl.config.plugins import ALGORITHMS
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.telemetry.names import STEP_SECONDS
from lora_moe_rl.verify.report import table

ABOUT = """\
The steps of `bench step` with each algorithm, in turns, once a round: seconds of a whole step, and
of its update, over those of the first algorithm in the same round. The work is the same for all: no
prompt is drawn again, and a critic learns beside the policy from the first step on.
"""
WANTED, ROUNDS, STEPS = "grpo,dapo,gspo,cispo,ppo", 3, 16
UPDATE = "time/train"
# Over the first: an algorithm without a critic, and one with a critic of its own.
MOST, MOST_WITH_CRITIC = 1.05, 2.2
SAME_WORK = {"draw_again": 0, "critic_warmup": 0}  # for all that have the setting


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)
    wanted = names(options.algorithms, "--algorithms", "an algorithm")
    busy = busy_cores()
    with contextlib.ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(temporary()))
        folder.mkdir(parents=True, exist_ok=True)
        recipes = {name: _recipe(folder, name, options.steps) for name in wanted}
        rounds = [
            {
                name: _seconds(recipe, f"{name}-{i}", options.steps)
                for name, recipe in recipes.items()
            }
            for i in range(options.rounds)
        ]
    result = {
        "steps": options.steps,
        "rounds": options.rounds,
        "cores": cores(),
        "busy_cores_before": busy,
        **compare(rounds),
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def _recipe(folder: Path, name: str, steps: int) -> Path:
    """That of `bench step` with an algorithm, its model and its prompts."""
    from lora_moe_rl.bench.model import make_model
    from lora_moe_rl.config.files import to_yaml

    if not (folder / "model").exists():
        make_model(folder / "model")
    step.write_prompts(folder / "prompts.jsonl", step.PROMPTS * (step.WARMUP + steps))
    recipe = folder / f"{name}.yaml"
    recipe.write_text(to_yaml(step.make_config(folder, steps, name=name, **same_work(name))))
    return recipe


def same_work(name: str) -> dict[str, Any]:
    """Of SAME_WORK what an algorithm has."""
    fields = ALGORITHMS.find(name).read({"name": name}).model_dump()
    return {key: value for key, value in SAME_WORK.items() if key in fields}


def _seconds(recipe: Path, name: str, steps: int) -> dict[str, float]:
    """Medians over the measured steps of a run. Raises BenchmarkError when it was not right."""
    records = run(name, recipe.parent / name, recipe, step.WARMUP + steps, [])
    if reasons := step.gate(records, step.WARMUP + steps):
        raise BenchmarkError(f"{name}: no seconds to report: " + "; ".join(reasons))
    measured = records[step.WARMUP :]
    return {key: median(record[key] for record in measured) for key in (STEP_SECONDS, UPDATE)}


def compare(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> Result:
    """By algorithm: the median seconds over the rounds, and the median of what each round has over
    its first algorithm."""
    base, *others = rounds[0]

    def over(name: str, key: str) -> float:
        return median(one[name][key] / one[base][key] for one in rounds)

    rows: dict[str, Any] = {
        name: {
            "step": median(one[name][STEP_SECONDS] for one in rounds),
            "update": median(one[name][UPDATE] for one in rounds),
            "step_over": over(name, STEP_SECONDS),
            "update_over": over(name, UPDATE),
        }
        for name in rounds[0]
    }
    goals = {
        f"{name}: a step over one of {base}": goal(rows[name]["step_over"], _most(name))
        for name in others
    }
    return {"algorithms": rows, "goals": goals}


def _most(name: str) -> float:
    made = algorithms.make(RunConfig.model_validate({"algorithm": {"name": name}}))
    return MOST if made.critic is None else MOST_WITH_CRITIC


def parts(result: Result) -> Iterable[Any]:
    yield (
        f"{result['rounds']} rounds of {result['steps']} steps each, {result['cores']} cores; "
        "medians"
    )
    base = next(iter(result["algorithms"]))
    shown = table(["", "step s", f"over {base}", "update s", f"over {base}"])
    for name, row in result["algorithms"].items():
        shown.add_row(
            name,
            f"{row['step']:.3f}",
            f"{row['step_over']:.3f}",
            f"{row['update']:.3f}",
            f"{row['update_over']:.3f}",
        )
    yield shown


def _parser():
    parser = result_parser("bench cost", ABOUT)
    parser.add_argument("--algorithms", default=WANTED, help=f"names, with commas ({WANTED})")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"measured ({STEPS})")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help=f"of each ({ROUNDS})")
    parser.add_argument(
        "--out",
        type=Path,
        help="a directory that keeps the runs; one that is whole is not run again",
    )
    return parser
