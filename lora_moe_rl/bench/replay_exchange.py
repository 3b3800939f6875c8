"""What is gained where routes tell how many tokens go to each expert before the forwards: a whole
forward and backward on two ranks that share the experts, told and asking, in turns."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from lora_moe_rl.bench.model import save_with_experts
from lora_moe_rl.bench.replay_cost import demo_samples
from lora_moe_rl.config import RunConfig
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import send

ROUNDS, MICRO_BATCH = 15, 400
LAYERS = (4, 16)


def measure(folder: Path) -> list[dict[str, Any]]:
    """For each number of layers: median seconds, and how often a rank asks the other one."""
    return [_of_layers(folder / f"exchange{layers}", layers) for layers in LAYERS]


def _of_layers(folder: Path, layers: int) -> dict[str, Any]:
    from lora_moe_rl.verify.ranks import run_ranks

    save_with_experts(folder, "qwen3_moe", 8, {"num_hidden_layers": layers})
    trainer = {
        "device": "cpu",
        "dtype": "float32",
        "world_size": 2,
        "ep": 2,
        "micro_batch_tokens": MICRO_BATCH,
    }
    config = RunConfig.model_validate(
        {"model": {"path": str(folder)}, "trainer": trainer, "replay": {"audit": 0}}
    )
    found, _ = run_ranks(config, folder, exchange_job, timeout_s=600)
    return {"layers": layers} | found


def exchange_job(worker, spec) -> dict[str, Any]:
    from torch import distributed as dist

    batch, rows = demo_samples(spec)
    shape, lengths = spec.shape, [len(ids) - 1 for ids in batch.token_ids]
    sent = send(RouteTable.build(rows, lengths, shape.moe_layers, shape.num_experts, shape.top_k))
    taken: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * (ROUNDS + 1)):
        told = turn % 2 == 0
        worker.engine.exchange.asks = told
        dist.barrier()
        started = time.perf_counter()
        worker.gradients(batch, sent)
        dist.barrier()
        taken[told].append(time.perf_counter() - started)
    told_s, asking_s = median(taken[True][1:]), median(taken[False][1:])
    return {
        "told": told_s,
        "asking": asking_s,
        "ratio": told_s / asking_s,
        "times": worker.engine.forwards[0] * len(shape.moe_layers),
    }
