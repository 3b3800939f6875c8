"""`lora-moe-rl bench lengths`: samples of unlike lengths in one micro-batch, attended to in batches
of about a length, against one batch that is padded to the longest."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lora_moe_rl.bench import report
from lora_moe_rl.bench.model import make_model
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.verify.inputs import random_adapter
from lora_moe_rl.verify.ranks import run_ranks
from lora_moe_rl.verify.report import table

ABOUT = """\
Loss and gradients of one step on one trainer rank, on the CPU in float32, of a 2M-parameter
Qwen3-MoE with random weights and LoRA on everything, routers choosing: one micro-batch of samples
that are equally long, whose lengths are lognormal, and of which one is as long as all others
together; attended to in batches of about a length, and in one batch, in turns. Processor seconds,
medians; places of queries with those of padding; and how far the gradients are apart.
"""
MOST_GRADIENTS, LEAST_FASTER = 1e-5, 2.0
TIMEOUT_S = 3000


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench lengths", ABOUT)
    parser.add_argument("--samples", type=positive, default=16, help="of the micro-batch (16)")
    parser.add_argument("--tokens", type=positive, default=256, help="of a sample, the mean (256)")
    parser.add_argument("--rounds", type=positive, default=3, help="of each (3)")
    options = parser.parse_args(argv)
    busy, sizes = busy_cores(), (options.samples, options.tokens, options.rounds)
    with temporary() as folder:
        make_model(Path(folder))
        trainer = {"device": "cpu", "dtype": "float32", "micro_batch_tokens": 2**20}
        config = RunConfig(
            model={"path": folder, "max_length": 2**13},
            trainer=trainer,
            adapter={"rank": 16},
            replay={"mode": "off"},
        )
        (rows,) = run_ranks(config, Path(folder), measured, *sizes, timeout_s=TIMEOUT_S)
    result = {
        "rows": rows,
        "samples": options.samples,
        "cores": cores(),
        "busy_cores_before": busy,
        "goals": {
            "gradients, largest difference, relative": goal(
                max(row["apart"] for row in rows), MOST_GRADIENTS
            ),
            "times as fast where one is long": goal(
                rows[-1]["one batch"] / rows[-1]["of a length"], LEAST_FASTER, True
            ),
        },
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def lengths_of(samples: int, tokens: int) -> dict[str, np.ndarray]:
    """int64 `[samples]` each, of `tokens` in the mean."""
    rng, equal = np.random.default_rng(0), np.full(samples, tokens)
    drawn = rng.lognormal(sigma=1.0, size=samples)
    uneven = np.maximum(2, drawn * tokens * samples / drawn.sum()).astype(np.int64)
    one = np.full(samples, max(2, tokens // 2))
    one[0] = max(2, samples * tokens - one[1:].sum())
    return {"equal": equal, "lognormal": uneven, "one is long": one}


def measured(worker: Any, spec: Any, samples: int, tokens: int, rounds: int) -> list[Result]:
    """Measured in a trainer rank: for each kind of lengths, seconds of both ways and how far they
    are apart."""
    worker.set_adapter(random_adapter(spec))
    kinds = lengths_of(samples, tokens).items()
    return [_row(worker, spec, kind, lengths, rounds) for kind, lengths in kinds]


def _row(worker: Any, spec: Any, kind: str, lengths: np.ndarray, rounds: int) -> Result:
    from lora_moe_rl.trainer import packed_sequences

    rng, usual = np.random.default_rng(1), packed_sequences.CALL
    ids = [rng.integers(0, spec.shape.vocab_size, n + 1) for n in lengths.tolist()]
    batch = TrainBatch.from_sequences(ids, [1] * len(ids), step=1)
    batch.advantages = [np.full(n, rng.normal(), np.float32) for n in lengths.tolist()]
    calls = {"of a length": usual, "one batch": 2**62}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    gradients, every = {}, np.ones(len(lengths), bool)
    try:
        for _ in range(rounds + 1):  # the first to warm up
            for name, packed_sequences.CALL in calls.items():
                started = time.process_time()
                _, _, shards = worker.gradients(batch)
                seconds[name].append(time.process_time() - started)
                gradients[name] = [shard.data for shard in shards]
    finally:
        packed_sequences.CALL = usual
    batches = packed_sequences.of_a_length(lengths, every)
    scale = max(float(np.abs(one).max()) for one in gradients["one batch"])
    pairs = zip(*gradients.values(), strict=True)
    return {
        "lengths": kind,
        "tokens": int(lengths.sum()),
        "batches": len(batches),
        "places of a length": int(sum(one.sum() * lengths[one].max() for one in batches)),
        "places of one batch": int(len(lengths) * lengths.max()),
        "apart": max(float(np.abs(one - other).max()) for one, other in pairs) / scale,
        **{name: median(found[1:]) for name, found in seconds.items()},
    }


def parts(result: Result) -> Iterable[Any]:
    yield f"{result['samples']} samples in one micro-batch"
    shown = table(
        ["lengths", "tokens", "batches", "places", "s", "places, one batch", "s, one batch",
         "times as fast"]
    )  # fmt: skip
    for row in result["rows"]:
        ours, theirs = row["of a length"], row["one batch"]
        shown.add_row(
            row["lengths"],
            *(f"{row[name]:,}" for name in ("tokens", "batches", "places of a length")),
            f"{ours:.3f}",
            f"{row['places of one batch']:,}",
            f"{theirs:.3f}",
            f"{theirs / ours:.2f}",
        )
    yield shown
