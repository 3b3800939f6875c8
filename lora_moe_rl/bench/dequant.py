"""`lora-moe-rl bench dequant`: a quantised base in the trainer, against one of numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lora_moe_rl.bench import report
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.config.options import at_least, positive, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.verify.report import table

ABOUT = """\
A trainer rank on a base whose routed experts are INT4 in groups of 32, and on the same weights as
float32, each in a process of its own on the CPU in float32: what it holds of the base, how far its
memory grows, and the seconds of a forward and backward of adapters on all linears. Both have to
give the same logprobs and gradients.
"""
# Of DeepSeek-V3's kind, whose first layer is dense: {option: (default, its type, key of its
# config.json)}
SIZES = {
    "layers": (4, at_least(2), "num_hidden_layers"),
    "hidden": (512, at_least(32, 32), "hidden_size"),
    "experts": (32, positive, "n_routed_experts"),
    "width": (512, at_least(32, 32), "moe_intermediate_size"),
}
TOKENS = 2048
MOST_OFF = 1e-6  # of logprobs and gradients, over the largest
MOST_HELD, MOST_SECONDS = 1.1, 1.5


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench dequant", ABOUT)
    for name, (default, kind, _) in SIZES.items():
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"({default})")
    parser.add_argument("--tokens", type=positive, default=TOKENS, help=f"of a step ({TOKENS})")
    options = parser.parse_args(argv)
    sizes = {key: getattr(options, name) for name, (_, _, key) in SIZES.items()}
    busy = busy_cores()
    with temporary() as folder:
        result = measure(Path(folder), sizes, options.tokens)
    result |= {"cores": cores(), "busy_cores_before": busy}
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def measure(folder: Path, sizes: dict[str, int], tokens: int) -> Result:
    """Raises BenchmarkError when the two bases do not give the same."""
    _child("make", folder, json.dumps(sizes))
    packed, plain = (_child(form, folder, str(tokens)) for form in ("int4", "float32"))
    for key in ("logprobs", "gradients"):
        if not plain[f"{key}_off"] <= MOST_OFF:
            raise BenchmarkError(
                f"{key} of the two bases differ by {plain[f'{key}_off']:.1e}, more than "
                f"{MOST_OFF:g}; there are no figures of a wrong one"
            )
    return {
        "sizes": sizes,
        "tokens": tokens,
        "int4": packed,
        "float32": plain,
        "goals": {
            "experts held over the checkpoint's": goal(
                packed["experts"] / packed["stored"], MOST_HELD
            ),
            "seconds over float32's": goal(packed["seconds"] / plain["seconds"], MOST_SECONDS),
        },
    }


def _child(what: str, folder: Path, argument: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "lora_moe_rl.bench.dequant_child", what, str(folder), argument]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        raise BenchmarkError(f"{what}: {child.stderr.strip()[-800:]}")
    return json.loads(child.stdout.splitlines()[-1])


def parts(result: Result) -> Iterable[Any]:
    sizes = ", ".join(f"{key} {value}" for key, value in result["sizes"].items())
    yield f"{sizes}; {result['tokens']:,} tokens a step, {result['cores']} cores"
    shown = table(
        ["base", "experts, MB", "the rest", "buffers", "memory grew by", "peak", "s a step"]
    )
    for form in ("int4", "float32"):
        one = result[form]
        cells = [f"{one[key] / 1e6:,.1f}" for key in ("experts", "rest", "scratch", "anon", "peak")]
        shown.add_row(form, *cells, f"{one['seconds']:.2f}")
    yield shown
