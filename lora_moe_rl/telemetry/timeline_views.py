"""`lora-moe-rl timeline`: who waited for whom in a run, as a picture and as a trace.

timeline.png           the last steps: a row for feed, each engine, rewards, trainer, publish
timeline.trace.json    the same for https://ui.perfetto.dev or chrome://tracing: Chrome's Trace
                       Event Format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.errors import RunDirError
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.replacing import replace_file
from lora_moe_rl.files.run_dir import TIMELINE, TIMELINE_PICTURE, TIMELINE_TRACE
from lora_moe_rl.telemetry.timeline import (
    CHECKPOINT,
    EVALUATE,
    FEED,
    PUBLISH,
    REWARDS,
    SAMPLE,
    TEACH,
    TRAINER,
    Span,
)

STEPS_SHOWN = 6
COLORS = {
    SAMPLE: "#2b6cb0",
    EVALUATE: "#7f5fb5",
    TEACH: "#2f8f9d",
    "reward": "#4a9a6a",
    "update": "#dd8a2c",
    "publish": "#b9483d",
    CHECKPOINT: "#6b6b6b",
}
WAITING = "#e3e3e3"
MICROSECONDS = 1e6


@dataclass(frozen=True)
class Step:
    """Seconds since 1970; `spans` are those that ended in the step."""

    number: int
    begin: float
    end: float
    spans: list[Span]


def main(argv: Sequence[str]) -> int:
    parser = result_parser("timeline", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--steps",
        type=positive,
        default=STEPS_SHOWN,
        help=f"the last so many steps ({STEPS_SHOWN})",
    )
    options = parser.parse_args(argv)
    written = write(options.run, options.steps)
    if not written:
        raise RunDirError(
            f"{options.run / TIMELINE} has no step: name the directory of a run that has done one"
        )
    paths = [str(path) for path in written]
    print(json.dumps({"written": paths}) if options.json else "\n".join(paths))
    return 0


def write(run: Path, last: int = STEPS_SHOWN) -> list[Path]:
    """Writes picture and trace of a run's last steps. Returns what it wrote: nothing when no step
    was done."""
    steps = list(read(run / TIMELINE))[-last:]
    if not steps:
        return []
    picture, traced = run / TIMELINE_PICTURE, run / TIMELINE_TRACE
    draw(steps, picture, run.absolute().name)
    replace_file(traced, json.dumps(trace(steps)).encode())
    return [picture, traced]


def read(path: Path) -> Iterator[Step]:
    for record in read_jsonl(path):
        spans = [
            Span(who, what, number, begin, begin + seconds)
            for who, what, number, begin, seconds in record["spans"]
        ]
        yield Step(record["step"], record["begin"], record["end"], spans)


def rows(steps: Sequence[Step]) -> list[str]:
    """Who has a row, from above."""
    found = {span.who for step in steps for span in step.spans}
    engines = sorted(found - {FEED, REWARDS, TRAINER, PUBLISH}, key=lambda who: (len(who), who))
    return [FEED, *engines, REWARDS, TRAINER, PUBLISH]


def trace(steps: Sequence[Step]) -> dict[str, Any]:
    """In Chrome's Trace Event Format: a process for each row. Spans that overlap (the prompts that
    an engine samples at once) are laid into lanes, each a thread of its own, since those of one
    thread have to be nested. Times are microseconds from the first step's begin."""
    first = steps[0].begin
    events: list[dict[str, Any]] = []
    for pid, who in enumerate(rows(steps), start=1):
        events.append(_named("process_name", pid, 0, who))
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {}})
        events[-1]["args"]["sort_index"] = pid
        for lane, span in _lanes([s for step in steps for s in step.spans if s.who == who]):
            events.append(_event(span, pid, lane, first))
    for step in steps:
        at = (step.begin - first) * MICROSECONDS
        name = f"step {step.number}"
        events.append({"ph": "i", "s": "g", "name": name, "ts": at, "pid": 1, "tid": 0})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _event(span: Span, pid: int, lane: int, first: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.what if span.waits else f"{span.what} {span.number}",
        "cat": "wait" if span.waits else span.what,
        "ts": (span.begin - first) * MICROSECONDS,
        "dur": span.seconds * MICROSECONDS,
        "pid": pid,
        "tid": lane,
    }


def _lanes(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Each span with the first lane that is free when it begins."""
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: span.begin):
        free = (lane for lane, end in enumerate(ends) if end <= span.begin)
        lane = next(free, len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = span.begin + span.seconds
        yield lane, span


def draw(steps: Sequence[Step], path: Path, title: str) -> None:
    """A row for each of those who work. Where several things are done at once, the darker it is
    the more. Grey: it waits."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names, first = rows(steps), steps[0].begin
    figure = Figure(figsize=(13, 1.2 + 0.5 * len(names)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    axes = figure.subplots()
    for place, who in enumerate(names):
        spans = [span for step in steps for span in step.spans if span.who == who]
        _draw_row(axes, place, spans, first)
    _draw_steps(axes, steps, first)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.9)
    axes.set_xlim(0, steps[-1].end - first)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(f"{title}: who did what (grey: it waits)", x=0.012, ha="left", fontsize=11)
    figure.savefig(path)


def _draw_row(axes: Any, place: int, spans: Sequence[Span], first: float) -> None:
    waits = [(s.begin - first, s.seconds) for s in spans if s.waits]
    axes.broken_barh(waits, (place - 0.36, 0.72), facecolors=WAITING, linewidth=0)
    for what in dict.fromkeys(span.what for span in spans if not span.waits):
        begins, ends, counts = _at_once([span for span in spans if span.what == what])
        for begin, end, count in zip(begins - first, ends - first, counts, strict=True):
            share = 0.35 + 0.65 * count / counts.max()
            bar = [(begin, end - begin)], (place - 0.36, 0.72)
            axes.broken_barh(*bar, facecolors=COLORS[what], alpha=share, linewidth=0)


def _at_once(spans: Sequence[Span]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(begin, end, how many spans) of each piece of time in which there are some."""
    begins = np.array([span.begin for span in spans])
    ends = np.array([span.begin + span.seconds for span in spans])
    times = np.unique(np.concatenate([begins, ends]))
    counts = np.searchsorted(np.sort(begins), times[:-1], "right")
    counts = counts - np.searchsorted(np.sort(ends), times[:-1], "right")
    some = counts > 0
    return times[:-1][some], times[1:][some], counts[some]


def _draw_steps(axes: Any, steps: Sequence[Step], first: float) -> None:
    for step in steps:
        axes.axvline(step.end - first, color="#888888", linewidth=0.6, linestyle=":")
        middle = (step.begin + step.end) / 2 - first
        axes.text(middle, -0.6, f"step {step.number}", ha="center", fontsize=8, color="#555555")
