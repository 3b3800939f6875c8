"""`lora-moe-rl bench prompts`: prompts that are computed once for all samples, against one each."""

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
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.verify.inputs import random_adapter
from lora_moe_rl.verify.ranks import run_ranks
from lora_moe_rl.verify.report import table

ABOUT = """\
Loss and gradients of one step on one trainer rank, on the CPU in float32, of a 2M-parameter
Qwen3-MoE with random weights and LoRA on everything, routes replayed: groups of samples with
prompts of several lengths, each prompt fed once (trainer.share_prompts=on) and once a sample (off),
in turns. Medians, and how far the gradients are apart.
"""
PROMPTS = (16, 64, 256, 1024)
MOST_GRADIENTS, LEAST_FASTER = 1e-5, 2.0
TIMEOUT_S = 3000


def main(argv: Sequence[str]) -> int:
    parser = result_parser("bench prompts", ABOUT)
    parser.add_argument("--groups", type=positive, default=4, help="of samples (4)")
    parser.add_argument("--samples", type=positive, default=8, help="of a group (8)")
    parser.add_argument("--tokens", type=positive, default=64, help="of each response (64)")
    parser.add_argument("--rounds", type=positive, default=5, help="of each (5)")
    options = parser.parse_args(argv)
    busy = busy_cores()
    sizes = options.groups, options.samples, options.tokens, options.rounds
    with temporary() as folder:
        make_model(Path(folder))
        trainer = {"device": "cpu", "dtype": "float32", "micro_batch_tokens": 2**20}
        config = RunConfig(model={"path": folder}, trainer=trainer, adapter={"rank": 16})
        (rows,) = run_ranks(config, Path(folder), measured, *sizes, timeout_s=TIMEOUT_S)
    faster = rows[-1]["off"] / rows[-1]["on"]
    result = {
        "rows": rows,
        "groups": options.groups,
        "samples": options.samples,
        "tokens": options.tokens,
        "cores": cores(),
        "busy_cores_before": busy,
        "goals": {
            "gradients, largest difference, relative": goal(
                max(row["apart"] for row in rows), MOST_GRADIENTS
            ),
            f"times as fast with prompts of {PROMPTS[-1]} tokens": goal(faster, LEAST_FASTER, True),
        },
    }
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def measured(
    worker: Any, spec: Any, groups: int, samples: int, tokens: int, rounds: int
) -> list[Result]:
    """Measured in a trainer rank: for each length of prompt, seconds of both ways and how far they
    are apart."""
    worker.set_adapter(random_adapter(spec))
    return [_row(worker, spec, prompt, groups, samples, tokens, rounds) for prompt in PROMPTS]


def _row(worker, spec, prompt: int, groups: int, samples: int, tokens: int, rounds: int) -> Result:
    batch, routes = step_of(spec.shape, prompt, groups, samples, tokens)
    alike, seconds, gradients = batch.alike, {"on": [], "off": []}, {}
    for _ in range(rounds + 1):  # the first to warm up
        for name in seconds:
            batch.alike = alike if name == "on" else None
            started = time.perf_counter()
            _, _, shards = worker.gradients(batch, routes)
            seconds[name].append(time.perf_counter() - started)
            gradients[name] = [shard.data for shard in shards]
    batch.alike = alike
    scale = max(float(np.abs(one).max()) for one in gradients["off"])
    pairs = zip(gradients["on"], gradients["off"], strict=True)
    return {
        "prompt": prompt,
        "fed": batch.fed_together(range(len(batch))),
        "tokens": int(batch.lengths().sum()),
        "apart": max(float(np.abs(one - other).max()) for one, other in pairs) / scale,
        **{name: median(found[1:]) for name, found in seconds.items()},
    }


def step_of(
    shape: Any, prompt: int, groups: int, samples: int, tokens: int
) -> tuple[TrainBatch, RouteTable]:
    """A step of random tokens on random routes, which a group's samples share in their prompt."""
    rng = np.random.default_rng(0)
    ids, rows, size = [], [], (len(shape.moe_layers), shape.num_experts)
    for _ in range(groups):
        before = rng.integers(0, shape.vocab_size, prompt)
        routed = np.argsort(rng.random((prompt, *size)), axis=-1)[..., : shape.top_k]
        for _ in range(samples):
            ids.append(np.append(before, rng.integers(0, shape.vocab_size, tokens)))
            rest = np.argsort(rng.random((tokens - 1, *size)), axis=-1)[..., : shape.top_k]
            rows.append(np.concatenate([routed, rest]))
    batch = TrainBatch.from_sequences(ids, [prompt] * len(ids), step=1)
    batch.advantages = [np.full(tokens, one, np.float32) for one in rng.normal(size=len(ids))]
    batch.alike = np.arange(len(ids)) // samples * samples
    lengths = batch.lengths().tolist()
    layers, experts = shape.moe_layers, shape.num_experts
    return batch, RouteTable.build(rows, lengths, layers, experts, shape.top_k)


def parts(result: Result) -> Iterable[Any]:
    yield (
        f"{result['groups']} groups of {result['samples']} samples, {result['tokens']} tokens "
        f"after each prompt, {result['cores']} cores"
    )
    shown = table(["tokens of a prompt", "fed", "of", "s", "s, each its own", "times as fast"])
    for row in result["rows"]:
        shown.add_row(
            *(f"{row[name]:,}" for name in ("prompt", "fed", "tokens")),
            *(f"{row[name]:.3f}" for name in ("on", "off")),
            f"{row['off'] / row['on']:.2f}",
        )
    yield shown
