"""The end of a run: a table of its first and last steps, curves.png and the timeline's files, and
where its page is."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.page import link
from lora_moe_rl.telemetry import console, names, timeline_views
from lora_moe_rl.telemetry.metrics import read_evaluations, read_metrics

STEPS_COMPARED = 5
MOST_BARS = 300  # of a picture

# Metric -> (label, format, how the compared steps are summed up).
_ROWS = {
    names.REWARD: ("reward", ".3f", "mean"),
    names.NLL: ("loss", ".4f", "mean"),
    names.PERPLEXITY: ("perplexity", ".4g", "mean"),
    names.DPO: ("loss", ".4f", "mean"),
    names.MARGIN: ("margin", "+.3f", "mean"),
    names.ACCURACY: ("pairs the right way round", ".1%", "mean"),
    names.REWARDS_FAILED: ("failed rewards", ".0f", "max"),
    names.TEACHER_KL: ("reverse KL to the teacher", ".3f", "mean"),
    names.TRUNCATED: ("truncated samples", ".1%", "mean"),
    names.MISMATCH_KL: ("mismatch KL", ".1e", "max"),
    names.MISMATCH_LARGEST: ("mismatch, largest |Δlogprob|", ".1e", "max"),
    names.COVERAGE: ("replayed routes", ".2%", "min"),
    names.DISAGREEMENT: ("routes the trainer would change", ".2%", "mean"),
    names.GRAD_NORM: ("gradient norm", ".3g", "mean"),
    names.SKIPPED: ("skipped updates", ".0f", "sum"),
    names.TOKENS_PER_SECOND: ("tokens/s", ",.0f", "mean"),
    names.DATA_TOKENS_PER_SECOND: ("tokens/s", ",.0f", "mean"),
    **{names.time(stage): (f"{stage} s", ".3f", "mean") for stage in names.STAGES},
    names.STEP_SECONDS: ("step s", ".3f", "mean"),
}
_ABOVE_0 = {names.SKIPPED}  # of no interest as long as they are 0
_SUMMARIES = {"mean": np.mean, "max": np.max, "min": np.min, "sum": np.sum}


def finish(run_dir: RunDir) -> None:
    """Prints the table, writes curves.png and the timeline of the last steps, and says last how to
    look at the run. Nothing when no step was done."""
    records = read_metrics(run_dir)
    if not records:
        return
    console.show(table(records), wrapped=True)
    evaluations = read_evaluations(run_dir.metrics_file)
    draw(records, run_dir.curves_file, run_dir.path.name, evaluations)
    files = {"metrics": [run_dir.metrics_file], "curves": [run_dir.curves_file]}
    files["timeline"] = timeline_views.write(run_dir.path)
    for what, paths in files.items():
        console.show(Text(f"{what:<8} {' '.join(map(str, paths))}"))
    console.show(Text(f"page     {link.line(run_dir.path)}"))


def table(records: list[dict[str, Any]]) -> Table:
    """The first steps beside the last, where these are others, each row summed up as its label
    says."""
    result = Table(title=f"{len(records)} steps", title_justify="left", title_style="bold")
    parts = [f"steps {part}" for part in spans(records)] if len(records) > STEPS_COMPARED else []
    result.add_column("")
    for title in (*parts, "over all"):
        result.add_column(title, justify="right")
    for label, *cells in rows(records):
        result.add_row(label, *(cells if parts else cells[-1:]))
    return result


def rows(records: list[dict[str, Any]]) -> list[list[str]]:
    """A row of each metric that there is: its label, and what it was over the first steps, over the
    last (`spans`), and over all."""
    n, found = _compared(records), []
    for metric, (label, form, how) in _ROWS.items():
        least = 0 if metric in _ABOVE_0 else -math.inf
        if any((record.get(metric) or 0) > least for record in records if metric in record):
            parts = (records[:n], records[-n:], records)
            cells = [_summary(part, metric, form, how) for part in parts]
            found.append([label if how == "mean" else f"{label} ({how})", *cells])
    return found


def spans(records: list[dict[str, Any]]) -> tuple[str, str]:
    """Which steps the first and the last are, as 1-5 and 36-40."""
    n = _compared(records)
    return _span(records[:n]), _span(records[-n:])


def _compared(records: list[dict[str, Any]]) -> int:
    """How many steps the first and the last are: no step is both, but where all are."""
    return min(STEPS_COMPARED, len(records) // 2 if len(records) > STEPS_COMPARED else len(records))


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


def draw(
    records: list[dict[str, Any]],
    path: Path,
    title: str,
    evaluations: Sequence[dict[str, Any]] = (),
) -> None:
    """Three panels over the steps: reward with the deviation of its samples and the mean of each
    eval set, mismatch on a logarithmic axis, step time by stage. Without rewards the first two
    are the loss, with that of each eval set, and the gradient."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, fontweight="bold")
    first, second, seconds = figure.subplots(1, 3)
    steps = column(records, "step")
    if names.REWARD in records[0]:
        _draw_evaluations(first, evaluations)
        _draw_reward(first, steps, records)
        _draw_mismatch(second, steps, records)
    else:
        loss = next(name for name in (names.DPO, names.NLL, names.GRAD_NORM) if name in records[0])
        _draw_evaluations(first, evaluations)
        _draw_one(first, steps, records, loss, "loss")
        _draw_one(second, steps, records, names.GRAD_NORM, "gradient norm")
    _draw_seconds(seconds, steps, records)
    for axes in (first, second, seconds):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_xlim(*_limits(steps))
        axes.xaxis.get_major_locator().set_params(integer=True)
    if evaluations:  # of which one may be before the first step
        first.set_xlim(*_limits(np.append(steps, column(list(evaluations), "step"))))
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


def _draw_one(
    axes: Any, steps: np.ndarray, records: list[dict[str, Any]], metric: str, title: str
) -> None:
    values, others = column(records, metric), axes.get_legend_handles_labels()[1]
    axes.plot(steps, values, color=BLUE, linewidth=1.8, label="trained on", **_marker(steps))
    axes.set_title(f"{title} ({metric})", loc="left", fontsize=10)
    if others:
        axes.legend(frameon=False, fontsize=8, loc="best")


def _draw_evaluations(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    """Each set's mean with its 95 % interval, where it was evaluated; of a set that is judged by
    its rows' own answers the loss, which has none."""
    keys = dict.fromkeys(key for record in records for key in record)
    first = "|".join(names.EVAL_FIRST)
    found = (re.fullmatch(names.of_eval("([^/]+)", f"({first})"), key) for key in keys)
    sets = [(match[1], match[2]) for match in found if match]
    for (name, what), color in zip(sets, cycle((ORANGE, GREEN, RED, "#7f5fb5")), strict=False):
        own = [record for record in records if names.of_eval(name, what) in record]
        mean, width = (column(own, names.of_eval(name, one)) for one in (what, f"{what}_ci95"))
        style = {"marker": "o", "markersize": 3, "linewidth": 1.2, "elinewidth": 0.8}
        at = column(own, "step")
        axes.errorbar(at, mean, np.nan_to_num(width), color=color, label=f"eval {name}", **style)


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
    colors = {
        stage: color
        for stage, color in zip(names.STAGES, (BLUE, GREEN, ORANGE, RED), strict=True)
        if names.time(stage) in records[0]
    }
    stages = np.nan_to_num([column(records, names.time(stage)) for stage in colors])
    other = np.clip(
        np.nan_to_num(column(records, names.STEP_SECONDS)) - stages.sum(axis=0), 0, None
    )
    each = -(-len(steps) // MOST_BARS)  # steps of a bar
    steps = _means(steps, each)
    bottom = np.zeros(len(steps))
    colors["other"] = "#bbbbbb"
    style: dict[str, Any] = {"width": 0.85 * each, "linewidth": 0}
    for (label, color), seconds in zip(colors.items(), [*stages, other], strict=True):
        values = _means(seconds, each)
        axes.bar(steps, values, bottom=bottom, color=color, label=label, **style)
        bottom += values
    # Step 1 warms up, and may take several times the others: such a bar is cut, and says so.
    top = 1.35 * max(np.quantile(bottom, 0.9), 1e-3)
    axes.set_ylim(0, top)
    for step, total in zip(steps, bottom, strict=True):
        if total > top:
            axes.text(step + 0.6 * each, top, f"{total:.1f} s", fontsize=8, va="top")
    means = f", means of {each} steps" if each > 1 else ""
    axes.set_title(f"seconds a step{means}", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")


def _means(values: np.ndarray, each: int) -> np.ndarray:
    """The means of `each` values that follow each other; the last mean may be of fewer."""
    starts = np.arange(0, len(values), each)
    return np.add.reduceat(values, starts) / np.diff(starts, append=len(values))


def _marker(steps: np.ndarray) -> dict[str, Any]:
    return {"marker": "o", "markersize": 3} if len(steps) <= 60 else {}


def _limits(steps: np.ndarray) -> tuple[float, float]:
    return steps.min() - 0.6, steps.max() + 0.6
