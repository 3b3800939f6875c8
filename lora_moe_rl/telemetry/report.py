"""The end of a run: a table of its first and last steps, curves.png and the timeline's files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry import names, timeline_views
from lora_moe_rl.telemetry.metrics import read_metrics

STEPS_COMPARED = 5

# Metric -> (label, format, how the compared steps are summed up).
_ROWS = {
    names.REWARD: ("reward", ".3f", "mean"),
    names.REWARDS_FAILED: ("failed rewards", ".0f", "max"),
    names.TRUNCATED: ("truncated samples", ".1%", "mean"),
    names.MISMATCH_KL: ("mismatch KL", ".1e", "max"),
    names.MISMATCH_LARGEST: ("mismatch, largest |Δlogprob|", ".1e", "max"),
    names.COVERAGE: ("replayed routes", ".2%", "min"),
    names.DISAGREEMENT: ("routes the trainer would change", ".2%", "mean"),
    names.GRAD_NORM: ("gradient norm", ".3g", "mean"),
    names.TOKENS_PER_SECOND: ("tokens/s", ",.0f", "mean"),
    **{names.time(stage): (f"{stage} s", ".3f", "mean") for stage in names.STAGES},
    names.STEP_SECONDS: ("step s", ".3f", "mean"),
}
_SUMMARIES = {"mean": np.mean, "max": np.max, "min": np.min}


def finish(run_dir: RunDir) -> None:
    """Prints the table, and writes curves.png and the timeline of the last steps. Nothing when no
    step was done."""
    records = read_metrics(run_dir)
    if not records:
        return
    console = Console(highlight=False)
    console.print(table(records))
    draw(records, run_dir.curves_file, title=run_dir.path.name)
    files = {"metrics": [run_dir.metrics_file], "curves": [run_dir.curves_file]}
    files["timeline"] = timeline_views.write(run_dir.path)
    for what, paths in files.items():
        console.print(f"{what:<8} {' '.join(map(str, paths))}", soft_wrap=True)


def table(records: list[dict[str, Any]]) -> Table:
    """The first steps beside the last, each row summed up as its label says."""
    n = min(STEPS_COMPARED, len(records))
    first, last = records[:n], records[-n:]
    result = Table(title=f"{len(records)} steps", title_justify="left", title_style="bold")
    result.add_column("")
    result.add_column(f"steps {_span(first)}", justify="right")
    result.add_column(f"steps {_span(last)}", justify="right")
    result.add_column("over all", justify="right")
    for metric, (label, form, how) in _ROWS.items():
        if any(metric in record for record in records):
            cells = [_summary(part, metric, form, how) for part in (first, last, records)]
            result.add_row(label if how == "mean" else f"{label} ({how})", *cells)
    return result


def _span(records: list[dict[str, Any]]) -> str:
    first, last = records[0]["step"], records[-1]["step"]
    return f"{first}" if first == last else f"{first}-{last}"


def _summary(records: list[dict[str, Any]], metric: str, form: str, how: str) -> str:
    values = column(records, metric)
    values = values[~np.isnan(values)]
    return format(_SUMMARIES[how](values), form) if len(values) else "-"


def column(records: list[dict[str, Any]], metric: str) -> np.ndarray:
    """float64 [steps]; NaN where a step has no number."""
    values = (record.get(metric) for record in records)
    return np.array([math.nan if value is None else value for value in values], dtype=float)


def draw(records: list[dict[str, Any]], path: Path, title: str) -> None:
    """Three panels over the steps: reward with the deviation of its samples, mismatch on a
    logarithmic axis, step time by stage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
    reward, mismatch, seconds = figure.subplots(1, 3)
    steps = column(records, "step")
    _draw_reward(reward, steps, records)
    _draw_mismatch(mismatch, steps, records)
    _draw_seconds(seconds, steps, records)
    for axes in (reward, mismatch, seconds):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlim(*_limits(steps))
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path)


BLUE, ORANGE, GREEN, RED = "#2b6cb0", "#dd8a2c", "#4a9a6a", "#b9483d"


def _draw_reward(axes: Any, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    mean, std = column(records, names.REWARD), column(records, names.REWARD_STD)
    axes.fill_between(
        steps, mean - std, mean + std, color=BLUE, alpha=0.13, linewidth=0, label="± std of samples"
    )
    axes.plot(steps, mean, color=BLUE, linewidth=1.8, label="mean", **_marker(steps))
    axes.set_title("reward", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="best")


def _draw_mismatch(axes: Any, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    lines = {names.MISMATCH_LARGEST: ("largest |Δlogprob|", ORANGE)}
    lines[names.MISMATCH_KL] = ("KL (k3)", RED)
    axes.set_yscale("log")
    for metric, (label, color) in lines.items():
        values = column(records, metric)
        # A logarithmic axis has no zero: an exact agreement is a gap.
        values = np.where(values > 0, values, np.nan)
        axes.plot(steps, values, color=color, linewidth=1.5, label=label, **_marker(steps))
    axes.set_title("mismatch of trainer and engine", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="best")


def _draw_seconds(axes: Any, steps: np.ndarray, records: list[dict[str, Any]]) -> None:
    stages = np.nan_to_num([column(records, names.time(stage)) for stage in names.STAGES])
    other = np.clip(
        np.nan_to_num(column(records, names.STEP_SECONDS)) - stages.sum(axis=0), 0, None
    )
    colors = (BLUE, GREEN, ORANGE, RED, "#bbbbbb")
    bottom = np.zeros(len(steps))
    labels = (*names.STAGES, "other")
    for label, values, color in zip(labels, [*stages, other], colors, strict=True):
        axes.bar(steps, values, bottom=bottom, width=0.85, color=color, label=label, linewidth=0)
        bottom += values
    # Step 1 warms up, and may take several times the others: such a bar is cut, and says so.
    top = 1.35 * max(np.quantile(bottom, 0.9), 1e-3)
    axes.set_ylim(0, top)
    for step, total in zip(steps, bottom, strict=True):
        if total > top:
            axes.text(step + 0.6, top, f"{total:.1f} s", fontsize=8, va="top")
    axes.set_title("seconds a step", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")


def _marker(steps: np.ndarray) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3} if len(steps) <= 60 else {}


def _limits(steps: np.ndarray) -> tuple[float, float]:
    return steps.min() - 0.6, steps.max() + 0.6
