"""`lora-moe-rl bench base`: a base held once for trainer and engine, against a copy each."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from lora_moe_rl.base.owner import owned
from lora_moe_rl.base.store import BIN
from lora_moe_rl.bench import float64, report
from lora_moe_rl.bench.loading import Peak
from lora_moe_rl.bench.model import save_with_experts
from lora_moe_rl.bench.own_base import CountingEngine, outside
from lora_moe_rl.bench.process import mapped_bytes, private_bytes
from lora_moe_rl.bench.report import Result, busy_cores, cores, goal, temporary
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.options import positive, result_parser
from lora_moe_rl.tiny.shapes import SHAPES
from lora_moe_rl.verify.comparisons import largest
from lora_moe_rl.verify.engine import EngineProcess
from lora_moe_rl.verify.inputs import random_adapter, random_batch
from lora_moe_rl.verify.processes import run_processes
from lora_moe_rl.verify.ranks import Ranks, free_address, spec_of
from lora_moe_rl.verify.report import table

ABOUT = """\
A trainer and an engine on one model with random weights, on the CPU in float32: first with a base
each, then with one in a file that both map. Memory that is a process's own, at most while it starts
and once it has computed, what all processes together have of the base, in the file by their share
of it and beside it, how long the first user of the base takes to start and those after it, and how
far log-probabilities and gradients are from those on private copies, and log-probabilities of both
from a forward in float64.
"""
WIDTHS = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256}
LENGTHS = (20, 60)
MOST_HELD, MOST_LOGPROBS, MOST_GRADIENTS = 1.05, 5e-6, 1e-5
# Of a second user of the base, which starts so many times faster than one that loads its own; of a
# model that is large enough for its bytes to take the time.
FASTER, LARGE = 2.0, 2**30
TIMEOUT_S = 600
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
    parser.add_argument("--layout", choices=LAYOUTS, default="tp1", help="of both sides (tp1)")
    parser.add_argument("--dir", default="/dev/shm", help="where the one base lies (/dev/shm)")
    options = parser.parse_args(argv)
    busy = busy_cores()
    with temporary() as folder, owned(options.dir) as held:
        result = measure(Path(folder), options.model, options.experts, held, options.layout)
    result["busy_cores_before"] = busy
    report.conclude(result, options.json, parts)
    return 0 if report.all_met(result) else 1


def measure(folder: Path, name: str, experts: int, held: str, layout: str) -> Result:
    save_with_experts(folder, name, experts, WIDTHS)
    trainer, rollout = LAYOUTS[layout]
    config = RunConfig(
        model={"path": str(folder), "max_length": 128},
        adapter={"rank": 4, "alpha": 8},
        trainer={"dtype": "float32", "device": "cpu", **trainer},
        rollout={"cpu_kv_cache_gib": 0.06, **rollout},
    )
    spec = spec_of(folder, config)
    sequences = [row.tolist() for row in random_batch(spec, 8, 3, LENGTHS)[0].token_ids]
    (exact,) = run_processes(1, float64.logprobs, folder, sequences, timeout_s=TIMEOUT_S)
    own_engine = _engine(folder, config, spec, sequences, None)
    own, first, second = (_trainer(config, folder, base) for base in (None, held, held))
    file = Path(held) / BIN
    with Ranks(config, folder, False, TIMEOUT_S, held) as ranks:
        trainers = ranks.run(process_and_own)
        engine = _engine(folder, config, spec, sequences, held, [pid for pid, _ in trainers])
    size = sum(one.stat().st_size for one in folder.glob("*.safetensors"))
    of_base = engine["file"] + engine["beside"] + sum(own for _, own in trainers)
    gradients = max(
        _relative(a, b)
        for shared in (first, second)
        for a, b in zip(shared["gradients"], own["gradients"], strict=True)
    )
    found = {
        "held": of_base / size,
        "engine_logprobs": largest(engine["scores"], own_engine["scores"]),
        "trainer_logprobs": max(largest(x["scores"], own["scores"]) for x in (first, second)),
        "gradients": gradients,
    }
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
        "engine_from_float64": [largest(one["scores"], exact) for one in (own_engine, engine)],
        "trainer_from_float64": [largest(one["base_scores"], exact) for one in (own, second)],
        "goals": {
            "what all have of the base, times its size": goal(found["held"], MOST_HELD),
            "engine's logprobs, largest difference": goal(found["engine_logprobs"], MOST_LOGPROBS),
            "trainer's logprobs, largest difference": goal(
                found["trainer_logprobs"], MOST_LOGPROBS
            ),
            "gradients, largest difference, relative": goal(found["gradients"], MOST_GRADIENTS),
            **(_times_faster(own, second, own_engine, engine) if size >= LARGE else {}),
        },
    }


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


def process_and_own(worker, spec) -> tuple[int, int]:
    """Of a trainer rank that has started: its process, and bytes of the base that it has beside the
    file."""
    parameters = (p for chunk in worker.engine.chunks for p in chunk.parameters())
    frozen = (parameter for parameter in parameters if not parameter.requires_grad)
    return os.getpid(), outside(frozen, Path(worker.held) / BIN)


def _trainer(config: RunConfig, folder: Path, held: str | None) -> Result:
    """Of all trainer ranks together, from their start on."""
    arguments = (free_address(), config, folder, held)
    ranks = run_processes(config.trainer.world_size, train, *arguments, timeout_s=TIMEOUT_S)
    return {
        "scores": [score for rank in ranks for score in rank["scores"] or []],
        "base_scores": [score for rank in ranks for score in rank["base_scores"] or []],
        "gradients": [gradient for rank in ranks for gradient in rank["gradients"]],
        "private": sum(rank["private"] for rank in ranks),
        "peak": sum(rank["peak"] for rank in ranks),
        "seconds": max(rank["seconds"] for rank in ranks),
    }


def train(rank: int, address: str, config: RunConfig, folder: Path, held: str | None) -> Result:
    """What a trainer rank computes and holds. A job of `run_processes`."""
    from lora_moe_rl.trainer.worker import TrainerWorker

    spec = spec_of(folder, config)
    worker = TrainerWorker(config, spec, folder, rank, held)
    started = time.perf_counter()
    with Peak() as peak:
        worker.start(address, cores())
    seconds = time.perf_counter() - started
    batch, table = random_batch(spec, 8, 3, LENGTHS)
    worker.set_adapter(random_adapter(spec))
    sequences = [row.tolist() for row in batch.token_ids]
    scores = worker.score(sequences, None, adapters=True)
    base_scores = worker.score(sequences, None, adapters=False)
    _, _, shards = worker.gradients(batch, table)
    gc.collect()
    return {
        "scores": scores,
        "base_scores": base_scores,
        "gradients": [shard.data for shard in shards],
        "private": private_bytes(os.getpid()),
        "peak": peak.bytes,
        "seconds": seconds,
    }


def _engine(
    folder: Path,
    config: RunConfig,
    spec,
    sequences: list[list[int]],
    held: str | None,
    others: Sequence[int] = (),
) -> Result:
    """What an engine computes and holds, and of the file with `others`."""
    made = functools.partial(CountingEngine, held=held)
    with EngineProcess(config, spec, folder, folder / "engine.log", made) as engine:
        started = engine.start()
        (scores, _) = engine.ask("score", sequences, None)
        process = psutil.Process(engine.pid)
        mine = [process.pid, *(child.pid for child in process.children(recursive=True))]
        found: Result = {
            "scores": scores,
            "private": sum(private_bytes(pid) for pid in mine),
            "load": started["seconds"]["total"] - started["seconds"]["import"],
        }
        if held is not None:
            file = Path(held) / BIN
            found["file"] = sum(mapped_bytes(pid, file) for pid in [*mine, *others])
            found["beside"] = engine.ask("own_base", str(file))
    return found


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
