"""`lora-moe-rl bench base`: a base held once for trainer and engine, against a copy each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.base.owner import owned
from lora_moe_rl.base.store import BIN
from lora_moe_rl.bench import base_sides as sides
from lora_moe_rl.bench import report
from lora_moe_rl.bench.model import save_with_experts
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.errors import FileError
from lora_moe_rl.tiny.shapes import SHAPES
from lora_moe_rl.verify.comparisons import largest
from lora_moe_rl.verify.inputs import random_batch
from lora_moe_rl.verify.processes import run_processes
from lora_moe_rl.verify.ranks import Ranks, spec_of
from lora_moe_rl.verify.report import table

ABOUT = """\
A trainer and an engine on one model with random weights, on the CPU in float32: first with a base
each, then with one in a file that both map. Memory that is a process's own, at most while it starts
and once it has computed, what all processes together have of the base, in the file by their share
of it and beside it, how long the first user of the base takes to start and those after it, and how
far log-probabilities and gradients are from those on private copies. An engine's are compared with
those of one whose own linears are multiplied by the same kernel, torch's, so that nothing but
holding is between them; what the kernels differ in, torch's and those that vLLM packs an engine's
own linears for, is judged against float64: log-probabilities, and products of each kind of linear.
"""
WIDTHS = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256}
# Of a model of 2 GB whose weight is linears, embedding and head; of its layers three are dense.
DENSE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 256,
    "num_attention_heads": 16,
    "vocab_size": 65536,
}
THREE_DENSE = {
    "qwen3_moe": {"mlp_only_layers": [0, 1, 2], "head_dim": 128, "num_key_value_heads": 8},
    "deepseek_v3": {"first_k_dense_replace": 3, "num_key_value_heads": 16, "q_lora_rank": 1024},
}
MOST_HELD, MOST_LOGPROBS, MOST_GRADIENTS = 1.05, 5e-6, 1e-5
# Of the same bytes, multiplied by the same kernels.
MOST_HOLDING = 1e-7
# Root mean squares of errors against float64, torch's kernel's over those of vLLM's packed ones.
MOST_ERROR = 1.25
# Of a second user of the base, which starts so many times faster than one that loads its own; of a
# model that is large enough for its bytes to take the time.
FASTER, LARGE = 2.0, 2**30
# {name: (trainer's, engine's)}; vLLM shares experts out over its tensor-parallel ranks.
LAYOUTS = {
    "tp1": ({}, {}),
    "tp2": ({"world_size": 2, "tp": 2, "etp": 2}, {"tp": 2}),
    "ep2": ({"world_size": 2, "ep": 2}, {"tp": 2, "ep": True}),
    "tp2ep2": ({"world_size": 2, "tp": 2, "ep": 2}, {"tp": 2, "ep": True}),
}


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench base", ABOUT)
    parser.add_argument("--model", choices=SHAPES, default="qwen3_moe", help="(qwen3_moe)")
    parser.add_argument("--experts", type=positive, default=32, help="of each layer (32)")
    parser.add_argument("--dense", action="store_true", help="2 GB, most of it not in experts")
    parser.add_argument("--layout", choices=LAYOUTS, default="tp1", help="of both sides (tp1)")
    parser.add_argument("--dir", default="/dev/shm", help="where the one base lies (/dev/shm)")
    options = parser.parse_args(argv)
    if not Path(options.dir).is_dir():
        raise FileError(f"--dir {options.dir} is no directory")
    busy = busy_cores()
    with temporary() as folder, owned(options.dir) as held:
        sizes = DENSE | THREE_DENSE[options.model] if options.dense else WIDTHS
        save_with_experts(Path(folder), options.model, options.experts, sizes)
        result = measure(Path(folder), options.model, held, options.layout)
    result["busy_cores_before"] = busy
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def measure(folder: Path, name: str, held: str, layout: str) -> Result:
    trainer, rollout = LAYOUTS[layout]
    config = RunConfig(
        model={"path": str(folder), "max_length": 128},
        adapter={"rank": 4, "alpha": 8},
        trainer={"dtype": "float32", "device": "cpu", **trainer},
        rollout={"cpu_kv_cache_gib": 0.06, **rollout},
    )
    spec = spec_of(folder, config)
    sequences = [row.tolist() for row in random_batch(spec, 8, 3, sides.LENGTHS)[0].token_ids]
    (exact,) = run_processes(1, sides.exact_logprobs, folder, sequences, timeout_s=sides.TIMEOUT_S)
    own_engine = sides.engine(folder, config, spec, sequences, None)
    own, first, second = (sides.trainer(config, folder, base) for base in (None, held, held))
    file = Path(held) / BIN
    with Ranks(config, folder, False, sides.TIMEOUT_S, held) as ranks:
        trainers = ranks.run(sides.process_and_own)
        engine = sides.engine(folder, config, spec, sequences, held, [pid for pid, _ in trainers])
    size = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
    of_base = engine["file"] + engine["beside"] + sum(own for _, own in trainers)
    return {
        "model": name,
        "layout": layout,
        "bytes": size,
        "in_file": file.stat().st_size,
        "cores": cores(),
        "trainer": [own["private"], second["private"]],
        "trainer_peak": [own["peak"], second["peak"]],
        "engine": [own_engine["private"], engine["private"]],
        "load_seconds": [own_engine["load"], engine["load"]],
        "trainer_seconds": [own["seconds"], second["seconds"]],
        "first_seconds": first["seconds"],
        "engine_of_packed": largest(engine["scores"], own_engine["scores"]),
        "engine_from_float64": [largest(one["scores"], exact) for one in (own_engine, engine)],
        "kernels": own_engine["kernels"],
        "trainer_from_float64": [largest(one["base_scores"], exact) for one in (own, second)],
        "goals": {
            "what all have of the base, times its size": goal(of_base / size, MOST_HELD),
            **_of_engines(own_engine, engine, exact),
            **_of_trainers(own, (first, second)),
            **(_times_faster(own, second, own_engine, engine) if size >= LARGE else {}),
        },
    }


def _of_engines(own: Result, held: Result, exact: list[np.ndarray]) -> dict[str, Result]:
    products = [plain / packed for packed, plain in own["kernels"].values()]
    error = _error(held["scores"], exact) / _error(own["scores"], exact)
    return {
        "engine's logprobs, largest difference": goal(
            largest(held["scores"], own["as_held"]), MOST_HOLDING
        ),
        "engine's logprobs, error against float64, times that of packed kernels": goal(
            error, MOST_ERROR
        ),
        "products, the same, of the kind of linear that has most of it": goal(
            max(products), MOST_ERROR
        ),
    }


def _of_trainers(own: Result, held: Sequence[Result]) -> dict[str, Result]:
    logprobs = max(largest(one["scores"], own["scores"]) for one in held)
    gradients = max(
        _relative(a, b)
        for one in held
        for a, b in zip(one["gradients"], own["gradients"], strict=True)
    )
    return {
        "trainer's logprobs, largest difference": goal(logprobs, MOST_LOGPROBS),
        "gradients, largest difference, relative": goal(gradients, MOST_GRADIENTS),
    }


def _error(scores: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """The root mean square over all tokens."""
    return float(np.sqrt(np.mean((np.concatenate(scores) - np.concatenate(exact)) ** 2)))


def _times_faster(
    own: Result, held: Result, own_engine: Result, held_engine: Result
) -> dict[str, Result]:
    """Goals of the second user's start."""
    found = {
        "trainer": own["seconds"] / held["seconds"],
        "engine": own_engine["load"] / held_engine["load"],
    }
    return {
        f"a second {who} starts, times faster than with its own": goal(times, FASTER, at_least=True)
        for who, times in found.items()
    }


def _relative(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).max() / (np.abs(other).max() + 1e-30))


def parts(result: Result) -> Iterable[Any]:
    yield (
        f"{result['model']}, {result['layout']}, {result['bytes'] / 2**20:,.1f} MiB, of which "
        f"{result['in_file'] / 2**20:,.1f} in the file, float32, {result['cores']} cores"
    )
    shown = table(["", "a base each", "held once"])
    for name, key in (
        ("trainer's own MiB", "trainer"),
        ("the most while it starts", "trainer_peak"),
        ("engine's own MiB", "engine"),
    ):
        shown.add_row(name, *(f"{nbytes / 2**20:,.1f}" for nbytes in result[key]))
    for name, key in (
        ("trainer starts, s", "trainer_seconds"),
        ("engine loads, s", "load_seconds"),
    ):
        shown.add_row(name, *(f"{one:.2f}" for one in result[key]))
    shown.add_row("the first trainer, which writes, s", "", f"{result['first_seconds']:.2f}")
    for who in ("trainer", "engine"):
        shown.add_row(
            f"{who}'s logprobs from float64",
            *(f"{one:.1e}" for one in result[f"{who}_from_float64"]),
        )
    yield shown
    yield (
        f"engine's logprobs, largest difference from packed kernels: "
        f"{result['engine_of_packed']:.1e}"
    )
    errors = table(["products' error against float64", "vLLM's packed kernel", "torch's, as held"])
    for kind, both in result["kernels"].items():
        errors.add_row(kind, *(f"{one:.2e}" for one in both))
    yield errors
