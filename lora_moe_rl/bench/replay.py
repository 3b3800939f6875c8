"""`lora-moe-rl bench replay`: what router replay moves, what it costs, and what it is worth.

Sections, each on request:

    bytes    a token's routes at ceil(log2(experts)) bits an id, beside plain integers
    codec    packing and unpacking on one core, of int16 ids
    step     what replay adds to a step of the demo's size
    exchange a forward and backward on two ranks with EP, that are told how many tokens go to each
             expert, and that ask each other
    kimi     a trainer rank's share of 512 samples of 16k tokens of Kimi-K2's shape, at PP 8
    effect   mismatch with and without replay in bfloat16, on the same samples
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.bench.replay_report import parts
from lora_moe_rl.bench.report import Result, all_met, busy_cores, conclude, cores, goal, temporary
from lora_moe_rl.config.options import names, result_parser
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.kernels.route_codec import RowLayout, pack_array, unpack_array

SECTIONS = ("bytes", "codec", "step", "exchange", "kimi", "effect")
# (MoE layers, experts a token, experts) as published.
MODELS = {
    "Qwen3-30B-A3B": RowLayout(48, 8, 128),
    "Qwen3-235B-A22B": RowLayout(94, 8, 128),
    "DeepSeek-V3": RowLayout(58, 8, 256),
    "Kimi-K2": RowLayout(60, 8, 384),
    "Moonlight": RowLayout(26, 6, 64),
}
CODEC_TOKENS = 8192
CODEC_S = 0.3  # of each measurement at least
STEPS = 10


def main(argv: Sequence[str]) -> int:
    """Exit code 1 when a goal is missed. Raises BenchmarkError for figures that would be wrong."""
    parser = result_parser("bench replay", __doc__)
    parser.add_argument(
        "--only", default=",".join(SECTIONS), help=f"sections, with commas ({','.join(SECTIONS)})"
    )
    options = parser.parse_args(argv)
    result = measure(names(options.only, "--only", "a section", SECTIONS))
    conclude(result, options.json, parts)
    return 0 if all_met(result) else 1


def measure(sections: Sequence[str]) -> Result:
    result: Result = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": cores(),
        "busy_cores_before": busy_cores(),
    }
    with temporary() as folder:
        for name in sections:
            result[name] = _MEASURES[name](Path(folder))
    result["goals"] = goals(result)
    return result


def measure_bytes(folder: Path) -> dict[str, dict[str, int | None]]:
    """Bytes of one token's routes, by model; None where an id does not fit."""
    return {
        name: {
            "packed": layout.row_bytes,
            "uint8": None if layout.wide else layout.num_ids,
            "int16": 2 * layout.num_ids,
            "int32": 4 * layout.num_ids,
        }
        for name, layout in MODELS.items()
    }


def measure_codec(folder: Path) -> dict[str, dict[str, float]]:
    """GB of int16 ids a second, on one core: the best of several calls. Raises BenchmarkError when
    what is unpacked is not what was packed."""
    return {name: _codec(layout) for name, layout in MODELS.items()}


def _codec(layout: RowLayout) -> dict[str, float]:
    rng = np.random.default_rng(0)
    shape = (CODEC_TOKENS, layout.num_layers, layout.top_k)
    ids = rng.integers(0, layout.num_experts, shape, dtype=np.int16)
    packed = pack_array(ids, layout)
    if not np.array_equal(unpack_array(packed, layout), ids):
        raise BenchmarkError(f"no figures, the route codec is wrong for {layout}")
    pack = _best(lambda: pack_array(ids, layout))
    unpack = _best(lambda: unpack_array(packed, layout))
    return {"pack_gb_s": ids.nbytes / pack / 1e9, "unpack_gb_s": ids.nbytes / unpack / 1e9}


def _best(call: Callable[[], object]) -> float:
    taken: list[float] = []
    while len(taken) < 5 or sum(taken) < CODEC_S:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return min(taken)


def measure_step(folder: Path) -> Result:
    """Seconds that replay adds to a step, and those of a steady step of `bench step`."""
    from lora_moe_rl.bench import replay_cost, step

    (folder / "step").mkdir()
    seconds = step.measure(folder / "step", STEPS)["seconds"]["step"]
    found = replay_cost.measure_demo(folder / "step" / "model")
    added = sum(found["seconds"].values())
    return found | {"added": added, "step": seconds, "share": added / seconds}


def measure_exchange(folder: Path) -> list[dict[str, Any]]:
    from lora_moe_rl.bench import replay_exchange

    return replay_exchange.measure(folder)


def measure_kimi(folder: Path) -> Result:
    from lora_moe_rl.bench import replay_cost

    return replay_cost.measure_kimi(folder)


def measure_effect(folder: Path) -> Result:
    from lora_moe_rl.bench import replay_effect

    return replay_effect.measure(folder)


_MEASURES: dict[str, Callable[[Path], Any]] = {
    "bytes": measure_bytes,
    "codec": measure_codec,
    "step": measure_step,
    "exchange": measure_exchange,
    "kimi": measure_kimi,
    "effect": measure_effect,
}


def goals(result: Result) -> dict[str, Result]:
    """The goals of the sections that were measured."""
    found = {}
    if "codec" in result:
        for side in ("pack", "unpack"):
            slowest = min(row[f"{side}_gb_s"] for row in result["codec"].values())
            found[f"{side}, GB/s of int16, slowest model"] = goal(slowest, 1.0, at_least=True)
    if "step" in result:
        found["share of a step"] = goal(result["step"]["share"], 0.02)
    if "exchange" in result:
        worst = max(row["ratio"] for row in result["exchange"])
        found["forward and backward, told / asking"] = goal(worst, 1.0)
    if "kimi" in result:
        found["seconds a rank, Kimi-K2 at PP 8"] = goal(result["kimi"]["total"], 0.5)
    if "effect" in result:
        ratios = result["effect"]["on_over_off"]
        found["mismatch KL, on / off"] = goal(ratios["kl"], 0.5)
        found["mean |Δlogprob|, on / off"] = goal(ratios["mean_abs_logprob_diff"], 0.5)
    return found
