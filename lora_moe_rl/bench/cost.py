"""`lora-moe-rl bench cost`: what a step takes with other algorithms, of the same work."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lora_moe_rl import algorithms
from lora_moe_rl.bench import report, step
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import names, positive, result_parser
from lora_moe_rl.config.plugins import ALGORITHMS
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.names import STEP_SECONDS
from lora_moe_rl.verify.report import table

ABOUT = """\
The update of `bench step` with each algorithm, in turns on one trainer rank, all on the same
samples of a turn: seconds, and the median of what each turn has over the first algorithm's. Beside
it a whole step: rollout, rewards and refit do the same work whatever the algorithm, and their
seconds are those of one run with the first. No prompt is drawn again, and a critic learns beside
the policy from the first step on.
"""
WANTED, TURNS, STEPS = "grpo,dapo,gspo,cispo,ppo", 24, 10
UPDATE = "time/train"
# Over the first: an algorithm without a critic, and one with a critic of its own.
MOST, MOST_WITH_CRITIC = 1.05, 2.2
SAME_WORK = {"draw_again": 0, "critic_warmup": 0}  # for all that have the setting
TIMEOUT_S = 1800.0


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench cost", ABOUT)
    parser.add_argument("--algorithms", default=WANTED, help=f"names, with commas ({WANTED})")
    parser.add_argument("--turns", type=positive, default=TURNS, help=f"of updates ({TURNS})")
    parser.add_argument("--steps", type=positive, default=STEPS, help=f"of the run ({STEPS})")
    options = parser.parse_args(argv)
    wanted = names(options.algorithms, "--algorithms", "an algorithm")
    for name in wanted:
        if ALGORITHMS.find(name).learns_from != "rollouts":
            raise ConfigError(
                f"--algorithms {name}: it samples nothing, and a step here is one of samples; "
                "leave it out"
            )
    busy = busy_cores()
    with temporary() as path:
        folder = Path(path)
        configs = {name: _config(folder, name, options.steps) for name in wanted}
        others = other_stages(folder, configs[wanted[0]], options.steps)
        updates = _updates(configs, folder / "model", options.turns)
    result = {
        "turns": options.turns,
        "cores": cores(),
        "busy_cores_before": busy,
        "others": others,
        **compare(updates, others),
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def _config(folder: Path, name: str, steps: int) -> RunConfig:
    return step.make_config(folder, steps, name=name, **same_work(name))


def same_work(name: str) -> dict[str, Any]:
    """What of SAME_WORK an algorithm has."""
    fields = ALGORITHMS.find(name).read({"name": name}).model_dump()
    return {key: value for key, value in SAME_WORK.items() if key in fields}


def other_stages(folder: Path, config: RunConfig, steps: int) -> float:
    """Median seconds of a step without its update. Raises BenchmarkError when the run was not
    right."""
    recipe = step.write_run(folder, config)
    records = step.run_measured("its other stages", folder / "run", recipe, steps)
    return median(record[STEP_SECONDS] - record[UPDATE] for record in records)


def _updates(configs: Mapping[str, RunConfig], model: Path, turns: int) -> list[dict[str, float]]:
    from lora_moe_rl.verify.ranks import run_ranks

    first = next(iter(configs.values()))
    return run_ranks(first, model, in_turns, configs, turns, timeout_s=TIMEOUT_S)[0]


def in_turns(
    worker: Any, spec: Any, configs: Mapping[str, RunConfig], turns: int
) -> list[dict[str, float]]:
    """Seconds of each algorithm's update, by turn, on one rank (a job of `verify.ranks`). Which is
    first changes with the turn; a turn before them is for what is made once."""
    import numpy as np

    from lora_moe_rl.trainer.engine import TrainingEngine
    from lora_moe_rl.trainer.update import update
    from lora_moe_rl.verify.inputs import random_batch

    device, samples = worker.engine.device, step.PROMPTS * step.GROUP
    engines = {
        name: TrainingEngine(config, spec, worker.model_dir, device)
        for name, config in configs.items()
    }
    found, order = [], list(engines)
    for turn in range(turns + 1):
        batch, routes = random_batch(spec, samples, turn, (2 * step.TOKENS, 2 * step.TOKENS + 1))
        batch.step = 2  # whose routes are not audited
        batch.groups = np.repeat(np.arange(step.PROMPTS), step.GROUP)
        batch.rewards = np.random.default_rng(turn).normal(size=samples)
        spent = {}
        for name in order:
            started = time.perf_counter()
            update(engines[name], batch, (routes,))
            spent[name] = time.perf_counter() - started
        found.append({name: spent[name] for name in engines})
        order = order[1:] + order[:1]
    return found[1:]


def compare(updates: Sequence[Mapping[str, float]], others: float) -> Result:
    """What each algorithm costs: median seconds of an update and of a step, and the medians of what
    each turn has over its first algorithm."""
    base, *rest = updates[0]
    rows: dict[str, Any] = {
        name: {
            "update": median(turn[name] for turn in updates),
            "step": median(turn[name] for turn in updates) + others,
            "update_over": median(turn[name] / turn[base] for turn in updates),
            "step_over": median((turn[name] + others) / (turn[base] + others) for turn in updates),
        }
        for name in updates[0]
    }
    goals = {
        f"{name}: a step over one of {base}": goal(rows[name]["step_over"], _most(name))
        for name in rest
    }
    return {"algorithms": rows, "goals": goals}


def _most(name: str) -> float:
    made = algorithms.make(RunConfig.model_validate({"algorithm": {"name": name}}))
    return MOST if made.critic is None else MOST_WITH_CRITIC


def parts(result: Result) -> Iterable[Any]:
    yield (
        f"{result['turns']} turns, {result['cores']} cores; medians; the other stages of a step "
        f"take {result['others']:.3f} s"
    )
    base = next(iter(result["algorithms"]))
    shown = table(["", "step s", f"over {base}", "update s", f"over {base}"])
    for name, row in result["algorithms"].items():
        cells = (row[key] for key in ("step", "step_over", "update", "update_over"))
        shown.add_row(name, *(f"{value:.3f}" for value in cells))
    yield shown
