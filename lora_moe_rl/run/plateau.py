"""Whether a run's metric has stopped getting better (checkpoint.stop_after). Pure: no files.

A look is what one value of the metric is compared by: of a metric of evaluations each evaluation,
of any other the mean over the checkpoint.every steps up to a checkpoint. Nothing is remembered but
the metric's values, which stand in metrics.jsonl: a run that is resumed counts on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_moe_rl.config.checkpoint import CheckpointConfig
from lora_moe_rl.files.retention import mean_up_to
from lora_moe_rl.telemetry.metric_table import largest_is_best


@dataclass(frozen=True)
class Look:
    step: int
    value: float


@dataclass(frozen=True)
class Plateau:
    """`best` is the look that `since` looks after it were no better than."""

    best: Look
    since: int


def looks(values: Mapping[int, float], every: int, done: int) -> list[Look]:
    """Those up to the step `done`, in order. `every`: steps of a look; 0: each value is one. What
    has no value, or NaN, is none."""
    if every:
        ends = range(every, done + 1, every)
        found = [Look(step, mean_up_to(values, step, every)) for step in ends]
    else:
        found = [Look(step, value) for step, value in sorted(values.items()) if step <= done]
    return [look for look in found if not math.isnan(look.value)]


def plateau(found: Sequence[Look], patience: int, largest: bool) -> Plateau | None:
    """The best look, when at least `patience` looks came after it and none was better; None
    otherwise. As good as the best is not better."""
    best, since = None, 0
    for look in found:
        if best is None or (look.value > best.value if largest else look.value < best.value):
            best, since = look, 0
        else:
            since += 1
    return Plateau(best, since) if best is not None and since >= patience else None


def of_run(config: CheckpointConfig, values: Mapping[int, float], done: int) -> Plateau | None:
    """The plateau of a run whose metric has had these values up to the step `done`; None when there
    is none."""
    if not config.stop_after:
        return None
    every = 0 if config.best_of_evaluations else config.every
    return plateau(looks(values, every, done), config.stop_after, largest_is_best(config))


def text(config: CheckpointConfig, ended: Plateau) -> str:
    """Why a run ends, what was best, and how it would go on."""
    many, step = ended.since, ended.best.step
    look = "evaluation" if config.best_of_evaluations else "checkpoint"
    mean = "" if config.best_of_evaluations or config.every == 1 else f" over {config.every} steps"
    return (
        f"the last {many} {look}{'s' if many > 1 else ''} found {config.best_metric} no better "
        f"than {ended.best.value:.6g}{mean}, its best, at step {step} (checkpoint.stop_after="
        f"{config.stop_after}); to go on: --resume with checkpoint.stop_after above {many}, or 0"
    )
