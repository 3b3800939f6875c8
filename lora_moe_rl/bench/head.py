"""`lora-moe-rl bench head`: logprobs and gradients with all logits at once, and without."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from lora_moe_rl.bench import report
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.config.options import positive, positives, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.verify.report import table

ABOUT = """\
The output head of a micro-batch, forward and backward, on the CPU in float32: as the trainer does
it (logits of a few rows at a time, the gradient of hidden states formed beside them), and from all
logits by torch's cross entropy. Each in a process of its own: seconds, and how far the peak of its
memory rises. All logits are left out where this machine has no memory for them. Both have to give
the same logprobs and gradients.
"""
TOKENS, HIDDEN, VOCABULARY = "1024,4096", 64, 151_936
ALL_LOGITS = 5 * 4  # bytes: logits, scaled, their log-softmax, its gradient and that of the logits
MOST_OFF = 5e-6  # of logprobs and gradients, over the largest: float32 sums over the vocabulary
LEAST_LESS, MOST_SECONDS = 10.0, 1.0


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench head", ABOUT)
    parser.add_argument("--tokens", type=positives, default=TOKENS, help=f"with commas ({TOKENS})")
    for name, default in (("hidden", HIDDEN), ("vocabulary", VOCABULARY)):
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"({default})")
    options = parser.parse_args(argv)
    busy = busy_cores()
    with temporary() as folder:
        rows = [
            measure(Path(folder), n, options.hidden, options.vocabulary) for n in options.tokens
        ]
    result = {
        "hidden": options.hidden,
        "vocabulary": options.vocabulary,
        "cores": cores(),
        "busy_cores_before": busy,
        "rows": rows,
        "goals": _goals([row for row in rows if row["plain"]]),
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def _goals(rows: Sequence[Result]) -> Result:
    """The goals, of the longest length that was measured both ways: of a short one all logits are
    few."""
    if not rows:
        return {}
    longest = max(rows, key=lambda row: row["tokens"])
    over = {key: longest["ours"][key] / longest["plain"][key] for key in ("bytes", "seconds")}
    name = f"{longest['tokens']} tokens: "
    return {
        name + "times less memory": goal(1 / over["bytes"], LEAST_LESS, at_least=True),
        name + "seconds over all logits'": goal(over["seconds"], MOST_SECONDS),
    }


def measure(folder: Path, tokens: int, hidden: int, vocabulary: int) -> Result:
    """Both ways. Raises BenchmarkError when they do not give the same."""
    sizes = [str(size) for size in (tokens, hidden, vocabulary)]
    needed = ALL_LOGITS * tokens * vocabulary
    ours, plain = _child("ours", folder, sizes), None
    if needed < psutil.virtual_memory().available:
        plain = _child("plain", folder, sizes)
        off = max(plain["logprobs_off"], plain["gradient_off"])
        if not off <= MOST_OFF:
            raise BenchmarkError(
                f"{tokens} tokens: the two ways differ by {off:.1e}, more than {MOST_OFF:g}; there "
                "are no figures of a wrong one"
            )
    return {"tokens": tokens, "needed": needed, "ours": ours, "plain": plain}


def _child(way: str, folder: Path, sizes: Sequence[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "lora_moe_rl.bench.head_child", way, str(folder), *sizes]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        raise BenchmarkError(f"{way}, {sizes[0]} tokens: {child.stderr.strip()[-500:]}")
    return json.loads(child.stdout)


def parts(result: Result) -> Iterable[Any]:
    yield (
        f"hidden {result['hidden']}, vocabulary {result['vocabulary']:,}, float32, "
        f"{result['cores']} cores"
    )
    shown = table(["tokens", "MB", "all logits, MB", "less", "s", "all logits, s", "over"])
    for row in result["rows"]:
        ours, plain = row["ours"], row["plain"]
        cells = [f"{row['tokens']:,}", f"{ours['bytes'] / 1e6:,.0f}"]
        if plain is None:
            cells += [f"{row['needed'] / 1e6:,.0f} needed", "", f"{ours['seconds']:.2f}", "", ""]
        else:
            cells += [f"{plain['bytes'] / 1e6:,.0f}", f"{plain['bytes'] / ours['bytes']:.1f}"]
            cells += [f"{one['seconds']:.2f}" for one in (ours, plain)]
            cells += [f"{ours['seconds'] / plain['seconds']:.2f}"]
        shown.add_row(*cells)
    yield shown
