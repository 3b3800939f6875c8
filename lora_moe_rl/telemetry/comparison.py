"""`lora-moe-rl compare`: runs side by side, as a table of final and best values, a picture of
metrics by step, and the settings in which they differ."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lora_moe_rl.config.evaluation import EVAL
from lora_moe_rl.config.files import read_config_file
from lora_moe_rl.config.keys import generic, member_keys, value_text
from lora_moe_rl.errors import ConfigError, RunDirError
from lora_moe_rl.files.jsonl import to_json
from lora_moe_rl.files.out_directory import require_file
from lora_moe_rl.files.run_dir import CONFIG, METRICS
from lora_moe_rl.files.unchanged import flat
from lora_moe_rl.telemetry import names
from lora_moe_rl.telemetry.metric_table import find, named
from lora_moe_rl.telemetry.metrics import read_evaluations, read_steps

# Steps at the end whose mean is the final value: one step alone is noise.
FINAL_STEPS = 5
HEADLINES = (
    names.REWARD,
    names.NLL,
    names.DPO,
    names.ACCURACY,
    names.RESPONSE_LENGTH,
    names.ENTROPY,
    names.MISMATCH_KL,
    names.GRAD_NORM,
    names.TOKENS_PER_SECOND,
    names.DATA_TOKENS_PER_SECOND,
    names.STEP_SECONDS,
)
# Of settings, what says nothing of how a run was made.
NOT_COMPARED = ("logging.", "tracker.", "name")
COLORS = ("#2b6cb0", "#dd8a2c", "#4a9a6a", "#b9483d", "#7f5fb5", "#3a9ea5", "#a0703c", "#666666")


@dataclass(frozen=True)
class Curve:
    """A metric of one run: int [n] steps and float [n] values, which are finite. `window`: how
    many of the last make the final value."""

    steps: np.ndarray
    values: np.ndarray
    window: int = FINAL_STEPS

    @property
    def final(self) -> float:
        """The mean over the last values; NaN for none."""
        return float(self.values[-self.window :].mean()) if len(self.values) else math.nan

    def best(self, better: str) -> tuple[float, int] | None:
        """The best value and its step, the first of several; None where neither way is better."""
        if not better or not len(self.values):
            return None
        place = int(self.values.argmax() if better == "up" else self.values.argmin())
        return float(self.values[place]), int(self.steps[place])


@dataclass(frozen=True)
class Run:
    """`records`: of steps and of evaluations, as metrics.jsonl has them; `settings`: by dotted
    key."""

    name: str
    records: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)

    def curve(self, metric: str) -> Curve:
        found = [
            (record["step"], value)
            for record in self.records
            if isinstance(value := record.get(metric), int | float) and math.isfinite(value)
        ]
        steps, values = zip(*found, strict=True) if found else ((), ())
        window = 1 if metric.startswith(EVAL) else FINAL_STEPS  # an evaluation is of one adapter
        return Curve(np.array(steps, dtype=int), np.array(values, dtype=float), window)


def read_run(path: Path, name: str) -> Run:
    """Raises RunDirError for what holds no run, or one without a step."""
    if not (path / CONFIG).is_file():
        raise RunDirError(f"{path} is not a run directory: it has no {CONFIG}")
    file = path / METRICS
    evaluations = read_evaluations(file)
    records = read_steps(file) + evaluations
    if not records:
        raise RunDirError(f"{path} has no step on record yet")
    return Run(name, records, flat(read_config_file(path / CONFIG)))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Named by as much of the ends of their paths as tells them apart."""
    absolute = [path.absolute() for path in paths]
    if len(set(absolute)) < len(absolute):
        raise ConfigError(f"a run is named twice among {' '.join(map(str, paths))}")
    deepest = max(len(path.parts) for path in absolute)
    ends = ([Path(*path.parts[-depth:]) for path in absolute] for depth in range(1, deepest + 1))
    shown = next(some for some in ends if len(set(some)) == len(some))
    return [read_run(path, str(end)) for path, end in zip(absolute, shown, strict=True)]


def chosen(runs: Sequence[Run], wanted: Sequence[str]) -> list[str]:
    """The metrics to compare: those that a user named, or the headlines and the means of
    evaluations, as far as a run has them. Raises ConfigError for one that no run has."""
    logged = list(dict.fromkeys(key for run in runs for one in run.records for key in one))
    if wanted:
        return [named(name, logged) for name in wanted]
    firsts = {names.of_eval("<set>", what) for what in names.EVAL_FIRST}
    evaluated = [name for name in logged if (row := find(name)) and row.name in firsts]
    return [*(name for name in HEADLINES if name in logged), *evaluated]


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The text of each setting that is not the same in all runs, - where a run has none. Of a
    section that the user named, as a data set, and that some run has not, only what was set."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    found = {}
    for key in keys:
        texts = [value_text(run.settings[key]) if key in run.settings else "-" for run in runs]
        if len(set(texts)) == 1 or key.startswith(NOT_COMPARED):
            continue
        of_members = member_keys().get(generic(key))
        if of_members is None or {*texts} != {"-", value_text(of_members.default)}:
            found[key] = texts
    return found


def as_data(runs: Sequence[Run], metrics: Sequence[str]) -> dict[str, Any]:
    """All that the table shows, for a program."""
    found: dict[str, Any] = {}
    for metric in metrics:
        better = _better(metric)
        of_runs = {}
        for run in runs:
            curve, best = run.curve(metric), None
            if (at := curve.best(better)) is not None:
                best = {"value": at[0], "step": at[1]}
            of_runs[run.name] = {"final": curve.final, "best": best, "steps": len(curve.steps)}
        found[metric] = {"better": better, "runs": of_runs}
    settings = {
        key: dict(zip([run.name for run in runs], texts, strict=True))
        for key, texts in differing(runs).items()
    }
    return {"metrics": found, "settings": settings}


def _better(metric: str) -> str:
    row = find(metric)
    return row.better if row else ""


def tables(runs: Sequence[Run], metrics: Sequence[str]) -> list[Table]:
    """Metrics, and the settings that differ. The better final value is bold."""
    shown = [Text(run.name) for run in runs]
    heads = [Column(name, justify="right", overflow="fold") for name in shown]
    values = Table(Column("metric", no_wrap=True), "", *heads)
    for metric in metrics:
        better = _better(metric)
        curves = [run.curve(metric) for run in runs]
        finals = [curve.final for curve in curves]
        values.add_row(Text(metric), "final", *_marked(finals, better))
        bests = [curve.best(better) for curve in curves]
        if any(bests):
            cells = [f"{best[0]:.4g} @ {best[1]}" if best else "-" for best in bests]
            values.add_row("", {"up": "highest", "down": "lowest"}[better], *cells)
    settings = Table(Column("setting", overflow="fold"), *map(Column, shown))
    for key, texts in differing(runs).items():
        settings.add_row(*map(Text, (key, *texts)))
    return [values, settings]


def _marked(values: Sequence[float], better: str) -> list[str]:
    known = [value for value in values if not math.isnan(value)]
    top = (max(known) if better == "up" else min(known)) if better and known else None
    texts = ["-" if math.isnan(value) else f"{value:.4g}" for value in values]
    alone = len(set(known)) > 1
    return [
        f"[bold]{text}[/bold]" if alone and value == top else text
        for text, value in zip(texts, values, strict=True)
    ]


def draw(runs: Sequence[Run], metrics: Sequence[str], path: Path) -> None:
    """A panel a metric, a line a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    across = min(3, len(metrics))
    down = math.ceil(len(metrics) / across)
    figure = Figure(figsize=(4.6 * across, 3.2 * down + 0.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, metric in zip(panels, metrics, strict=False):
        for place, run in enumerate(runs):
            curve = run.curve(metric)
            marker = {"marker": "o", "markersize": 2.5} if len(curve.steps) <= 60 else {}
            color = COLORS[place % len(COLORS)]
            axes.plot(curve.steps, curve.values, color=color, linewidth=1.3, **marker)
        row = find(metric)
        unit = f", {row.unit}" if row and row.unit else ""
        axes.set_title(f"{metric}{unit}", loc="left", fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        positive = all((run.curve(metric).values > 0).all() for run in runs)
        if metric.startswith("mismatch/") and positive:
            axes.set_yscale("log")
    for axes in panels[len(metrics) :]:
        axes.set_visible(False)
    labels = [run.name for run in runs]
    figure.legend(panels[0].get_lines(), labels, loc="outside upper left", ncols=4, frameon=False)
    with open(path, "wb") as file:  # with the name as it is, whatever its end
        figure.savefig(file, format="png")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lora-moe-rl compare",
        description="Runs side by side: final values (the mean of the last "
        f"{FINAL_STEPS} steps that have one, of evaluations the last), best values, settings that "
        "differ, and a picture of metrics by step. Runs may still go on.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--metrics", metavar="A,B", help="which; names that verl and TRL have are taken too"
    )
    parser.add_argument("--png", type=Path, default=Path("compare.png"), help="the picture")
    parser.add_argument("--json", action="store_true", help="print JSON, and draw nothing")
    parser.add_argument("--traceback", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.json:
        require_file(options.png, "--png")
    runs = read_runs(options.runs)
    metrics = chosen(runs, [one for one in (options.metrics or "").split(",") if one])
    if options.json:
        print(json.dumps(json.loads(to_json(as_data(runs, metrics))), indent=1))
        return 0
    console = Console(highlight=False)
    for table in tables(runs, metrics):
        if table.row_count:
            console.print(table)
    if not metrics:
        raise RunDirError(
            "none of these runs has a metric to compare yet; name some with --metrics"
        )
    draw(runs, metrics, options.png)
    print(f"picture {options.png}")
    return 0
