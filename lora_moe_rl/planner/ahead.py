"""`lora-moe-rl plan --run RUN`: which lag, and which split of its GPUs, would keep a run's trainer
and engines busy, by a simulation (run/simulation.py) with the stages that the run measured.

Other splits take the trainer's time as inverse to its ranks, and every engine as fast as the
measured ones; that trainer and engines slow each other down (they do on shared CPU cores) is as it
was in the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.recipes import load_config
from lora_moe_rl.errors import RunDirError
from lora_moe_rl.files.earlier_records import with_drawn
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import CONFIG, METRICS, ORDER, TIMELINE
from lora_moe_rl.telemetry import names
from lora_moe_rl.telemetry.metrics import read_steps
from lora_moe_rl.telemetry.timeline import REWARD, SAMPLE
from lora_moe_rl.telemetry.timeline_views import read

if TYPE_CHECKING:
    from lora_moe_rl.run.simulation import Stages

LAGS = (0, 1, 2, 4)
LAST = 20  # steps that are looked at, the first of a run excepted
AS_GOOD = 1.03  # of the shortest step: a smaller lag is worth more than that


@dataclass(frozen=True)
class Measured:
    """What a run measured: means, and `train_s`, the part of the update that is the trainer
    ranks'. `step_s` is what a step took."""

    config: RunConfig
    stages: Stages
    train_s: float
    step_s: float


@dataclass(frozen=True)
class Way:
    """One way to run, simulated. `ranks` of the trainer, `slots`: refit.slots at the least."""

    lag: int
    ranks: int
    engines: int
    slots: int
    step_s: float
    samples_per_s: float
    idle_trainer: float
    idle_engines: float


def show(run: Path, as_json: bool) -> int:
    """Prints what was measured, and all ways to run. Raises RunDirError for a run that has too few
    steps, of conversations of several turns, or whose trainer and engines share their devices."""
    measured = measure(run)
    own = simulated(measured, *_own(measured.config))
    ways = list(every_way(measured))
    chosen = best(ways)
    if as_json:
        parts: dict[str, Any] = {
            "measured": {**asdict(measured.stages), "step_s": measured.step_s},
            "simulated": asdict(own),
            "ways": [asdict(way) for way in ways],
            "best": asdict(chosen),
        }
        print(json.dumps(parts, indent=1))
    else:
        _print(measured, own, ways, chosen)
    return 0


def measure(run: Path) -> Measured:
    metrics = read_steps(run / METRICS)[1:][-LAST:]
    if not metrics:
        raise RunDirError(
            f"{run / METRICS} has no second step to measure (the first one warms up); name the "
            "directory of a run that has done some"
        )
    if names.of_environment("conversations") in metrics[-1]:
        raise RunDirError(
            f"{run / METRICS} is of conversations of several turns, which wait for others between "
            "their requests; the simulation knows runs of one request a prompt"
        )
    config = load_config(str(run / CONFIG))
    if config.placement.colocated:
        raise RunDirError(
            f"{run / CONFIG} has placement.mode=colocated: trainer and engines take turns on all "
            "devices, and there is neither a lag nor a split to look for"
        )
    known = {record["step"] for record in metrics}
    order = [record for record in read_jsonl(run / ORDER) if record["step"] in known]
    groups = [with_drawn(group) for record in order for group in record["groups"]]
    longest = {group["drawn"]: group["longest"] for group in groups}
    spans = [span for step in read(run / TIMELINE) if step.number in known for span in step.spans]
    sampled = [span for span in spans if span.what == SAMPLE and span.number in longest]
    if not sampled:
        raise RunDirError(f"{run / TIMELINE} and {run / ORDER} tell of no sample of these steps")
    rewards = [span.seconds for span in spans if span.what == REWARD]
    token_s, sequence_s = decoding(
        np.array([longest[span.number] for span in sampled], float),
        np.array([span.seconds for span in sampled]),
        in_flight([(span.who, span.begin, span.begin + span.seconds) for span in sampled]),
    )
    seconds = {stage: np.array([r[names.time(stage)] for r in metrics]) for stage in names.STAGES}
    steps = np.array([record[names.STEP_SECONDS] for record in metrics])
    from lora_moe_rl.run.simulation import Stages

    stages = Stages(
        [int(length) for length in longest.values()],
        token_s,
        sequence_s,
        float(np.mean(rewards)) if rewards else 0.0,
        float(np.mean(steps - seconds["rollout"] - seconds["reward"] - seconds["refit"])),
        float(np.mean(seconds["refit"])),
    )
    train_s = float(np.mean(seconds["train"]))
    return Measured(config, stages, train_s, float(np.mean(steps)))


def in_flight(spans: Sequence[tuple[str, float, float]]) -> np.ndarray:
    """For each (engine, begin, end): how many the engine had at once meanwhile, the mean over time;
    at least 1."""
    whose = np.array([engine for engine, _, _ in spans])
    begin, end = np.array([span[1:] for span in spans]).T
    shared = np.minimum(end[:, None], end) - np.maximum(begin[:, None], begin)
    shared = np.where(whose[:, None] == whose, shared.clip(0), 0)
    return shared.sum(axis=1) / np.maximum(end - begin, 1e-9)


def decoding(tokens: np.ndarray, seconds: np.ndarray, at_once: np.ndarray) -> tuple[float, float]:
    """(a, b) such that a token of a group takes about a + b * (groups at once) seconds: least
    squares, neither below 0."""
    parts = np.stack([tokens, tokens * at_once], axis=1)
    a, b = np.linalg.lstsq(parts, seconds, rcond=None)[0]
    if a < 0 or b < 0:
        alone = parts[:, 1] if a < 0 else parts[:, 0]
        one = float(alone @ seconds / (alone @ alone))
        a, b = (0.0, one) if a < 0 else (one, 0.0)
    return float(a), float(b)


def _own(config: RunConfig) -> tuple[int, int, int]:
    return config.schedule.lag, config.trainer.world_size, config.rollout.engines


def simulated(measured: Measured, lag: int, ranks: int, engines: int) -> Way:
    from lora_moe_rl.run.schedule import Schedule
    from lora_moe_rl.run.simulation import simulate

    config, stages = measured.config, measured.stages
    factor = config.trainer.world_size / ranks
    update_s = stages.update_s + measured.train_s * (factor - 1)
    algorithm = config.algorithm
    asked = config.schedule
    schedule = Schedule(
        algorithm.prompts_per_step,
        lag,
        algorithm.updates_per_step,
        asked.stale if lag else "wait",
        asked.in_flight == "continue",
    )
    found = simulate(schedule, replace(stages, update_s=update_s), engines)
    samples = algorithm.prompts_per_step * algorithm.group_size
    rate = samples / found.step_s
    idle = found.idle_trainer, found.idle_engines
    slots = asked.model_copy(update={"lag": lag}).slots
    return Way(lag, ranks, engines, slots, found.step_s, rate, *idle)


def every_way(measured: Measured) -> list[Way]:
    """All lags with all splits of as many GPUs as the run had: the trainer's layout stays, and has
    more or fewer data-parallel ranks."""
    config = measured.config
    trainer, rollout = config.trainer, config.rollout
    each = rollout.ranks
    gpus = trainer.world_size + rollout.engines * each
    unit = math.lcm(trainer.tp * trainer.cp, trainer.ep * trainer.etp) * trainer.pp
    splits = [
        (gpus - engines * each, engines)
        for engines in range(1, gpus // each + 1)
        if gpus > engines * each and (gpus - engines * each) % unit == 0
    ]
    own = config.schedule.lag, trainer.world_size, rollout.engines
    lags = sorted({*LAGS, own[0]})
    pairs = {*splits, own[1:]}
    return [simulated(measured, lag, *pair) for lag in lags for pair in sorted(pairs)]


def best(ways: Sequence[Way]) -> Way:
    """The way with the smallest lag, of those whose step is about the shortest."""
    shortest = min(way.step_s for way in ways)
    good = [way for way in ways if way.step_s <= AS_GOOD * shortest]
    return min(good, key=lambda way: (way.lag, way.step_s))


def _print(measured: Measured, own: Way, ways: Sequence[Way], chosen: Way) -> None:
    from rich.console import Console
    from rich.table import Table

    console, stages = Console(highlight=False, soft_wrap=True), measured.stages
    lengths = np.array(stages.lengths)
    console.print(
        f"measured: update {stages.update_s:.3g} s, publish {stages.publish_s:.3g} s, reward "
        f"{stages.reward_s:.3g} s; longest response of a prompt {np.median(lengths):g} tokens "
        f"(median), {lengths.max()} at most; a token {stages.token_s:.3g} s + "
        f"{stages.sequence_s:.3g} s for each prompt under way on its engine"
    )
    off = own.step_s / measured.step_s - 1
    console.print(
        f"a step took {measured.step_s:.3g} s; simulated as it ran (lag {own.lag}, {own.ranks} "
        f"trainer ranks, {own.engines} engines) {own.step_s:.3g} s, {off:+.0%}"
    )
    table = Table()
    heads = ("lag", "trainer\nranks", "engines", "step s", "samples/s")
    for head in (*heads, "trainer\nidle", "engines\nidle", ""):
        table.add_column(head, justify="right")
    for way in ways:
        rates = f"{way.step_s:.3g}", f"{way.samples_per_s:,.1f}"
        idle = f"{way.idle_trainer:.0%}", f"{way.idle_engines:.0%}"
        counts = map(str, (way.lag, way.ranks, way.engines))
        table.add_row(*counts, *rates, *idle, "best" if way is chosen else "")
    console.print(table)
