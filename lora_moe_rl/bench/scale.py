"""`lora-moe-rl bench scale`: how what a step costs beside its forwards grows with the step.

No engine, no model and no forward: the run's own functions on made-up samples, one after the other.
CPU seconds (the best of some rounds), the peak of the bytes that are allocated meanwhile, and the
exponents of both against the samples of the step, its data-parallel ranks and the engines, each of
which then sends its routes in one part, and against the model's layers and the experts of each; by
least squares on logarithms. 1 is linear, 2 quadratic.

    schedule    every ticket drawn, rolled, scored and trained by the ticket book
    signals     the algorithm's advantages and weights, GRPO
    batch       groups and signals to the trainer's batch
    travel      each rank's share of it handed over, and read by one rank
    plan        which samples go together on which rank: every rank does it for all
    pack        one rank's micro-batches
    routes      recorded routes checked, packed, and cut for 4 pipeline stages: by the engines
    replay      one rank's routes fetched, checked and cut
    records     the metrics and the health of a step

of an adapter on up to 64 layers with 96 experts and 16 with 384, of tiny widths:

    refit       the plan of a refit, the parts, and whether they are all of the adapter; of
                256 experts on up to 256 ranks (ep), to an engine without ep
    send        a version packed, checked and summed up, by one rank that holds it all
    export      a PEFT directory, its experts one by one
    import      such a directory, checked and read

Exit code 1 when an exponent is above 1.1.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lora_moe_rl.bench.report import Result, all_met, busy_cores, conclude, cores, goal
from lora_moe_rl.bench.scale_parts import GROUP, PARTS, RESPONSE, Size, Work
from lora_moe_rl.config.options import names, positive, result_parser

STEEPEST = 1.1
NEGLIGIBLE_S = 2e-3  # what takes less at the largest size has no exponent to speak of
NEGLIGIBLE_BYTES = 1 << 16
LARGEST, SMALLEST_PART, POINTS = 32_768, 16, 5
ROUNDS = 3
OTHERS = {
    "ranks": (1, 4, 16, 64, 256),
    "engines": (1, 4, 16, 64, 256),
    "layers": (4, 8, 16, 32, 64),
    "experts": (24, 48, 96, 192, 384),
}


def main(argv: Sequence[str]) -> int:
    """Exit code 1 when something grows too fast."""
    parser = result_parser("bench scale", __doc__)
    known = ",".join(PARTS)
    parser.add_argument("--only", default=known, help=f"parts, with commas ({known})")
    parser.add_argument(
        "--samples", type=positive, default=LARGEST, help=f"of the largest step ({LARGEST})"
    )
    parser.add_argument(
        "--tokens", type=positive, default=RESPONSE, help=f"of a response, the mean ({RESPONSE})"
    )
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help=f"({ROUNDS})")
    options = parser.parse_args(argv)
    parts = names(options.only, "--only", "a part", tuple(PARTS))
    result = measure(parts, Size(options.samples, options.tokens), options.rounds)
    conclude(result, options.json, tables)
    return 0 if all_met(result) else 1


def measure(parts: Sequence[str], largest: Size, rounds: int) -> Result:
    result: Result = {
        "date": time.strftime("%Y-%m-%d"),
        "tokens": largest.tokens,
        "cores": cores(),
        "busy_cores_before": busy_cores(),
        "parts": {},
        "goals": {},
    }
    for name in parts:
        part, axes = PARTS[name], {}
        ladder = _ladder(largest.samples // part.fewer)
        for axis in part.axes:
            steps = ladder if axis == "samples" else list(OTHERS[axis])
            last = replace(largest, samples=ladder[-1], **part.at)
            sizes = [replace(last, **{axis: value}) for value in steps]
            axes[axis] = growth(part.prepare, sizes, steps, rounds)
            for what, found in axes[axis]["exponent"].items():
                result["goals"][f"{name}, {what} against {axis}"] = goal(found, STEEPEST)
        result["parts"][name] = axes
    return result


def _ladder(largest: int) -> list[int]:
    """POINTS numbers of samples, in whole groups, the last SMALLEST_PART times the first."""
    first = max(1, largest // GROUP // SMALLEST_PART)
    return [GROUP * round(n) for n in np.geomspace(first, SMALLEST_PART * first, POINTS)]


def growth(
    prepare: Callable[[Size], Work], sizes: Sequence[Size], steps: list[int], rounds: int
) -> Result:
    """Seconds, peak bytes and exponents of what `prepare` gives for each of the sizes."""
    seconds = [min(_seconds(prepare(size)) for _ in range(rounds)) for size in sizes]
    peaks = [_peak(prepare(size)) for size in sizes]
    exponents = {
        "seconds": exponent(steps, seconds, NEGLIGIBLE_S),
        "bytes": exponent(steps, peaks, NEGLIGIBLE_BYTES),
    }
    return {"sizes": steps, "seconds": seconds, "bytes": peaks, "exponent": exponents}


def exponent(sizes: Sequence[float], costs: Sequence[float], negligible: float) -> float:
    """The slope of log cost over log size by least squares; 0 for what stays negligible."""
    if max(costs) < negligible:
        return 0.0
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(costs, 1e-9)), 1)[0])


def _seconds(work: Work) -> float:
    """CPU seconds of this process, of which other programs take none."""
    gc.collect()
    started = time.process_time()
    work()
    return time.process_time() - started


def _peak(work: Work) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def tables(result: Result) -> Iterator[Any]:
    """What is printed of the figures: a table for each axis and its sizes."""
    from lora_moe_rl.verify import report

    made: dict[tuple[str, ...], Any] = {}
    for name, axes in result["parts"].items():
        for axis, row in axes.items():
            steps = [f"{step:,}" for step in row["sizes"]]
            columns = ["CPU ms", *steps, "exponent", "MB", "exponent"]
            title = f"against {axis}"
            table = made.setdefault((axis, *steps), report.table(columns, title))
            cells = (f"{1e3 * seconds:,.1f}" for seconds in row["seconds"])
            slopes = [f"{row['exponent'][what]:.2f}" for what in ("seconds", "bytes")]
            table.add_row(name, *cells, slopes[0], f"{row['bytes'][-1] / 1e6:,.1f}", slopes[1])
    yield from made.values()
