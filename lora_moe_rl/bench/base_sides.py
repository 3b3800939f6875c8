"""`bench base`: what a trainer and an engine compute and hold, and what both should compute."""

from __future__ import annotations

import functools
import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from lora_moe_rl.base.store import BIN
from lora_moe_rl.bench.loading import Peak
from lora_moe_rl.bench.own_base import CountingEngine, outside
from lora_moe_rl.bench.process import mapped_bytes, private_bytes
from lora_moe_rl.bench.report import Result, cores
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import BenchmarkError
from lora_moe_rl.verify.engine import EngineProcess
from lora_moe_rl.verify.inputs import random_adapter, random_batch
from lora_moe_rl.verify.processes import run_processes
from lora_moe_rl.verify.ranks import free_address, spec_of

LENGTHS = (20, 60)
TIMEOUT_S = 600


def exact_logprobs(rank: int, folder: Path, sequences: list[list[int]]) -> list[np.ndarray]:
    """The logprobs of Hugging Face's forward in float64. A job of `run_processes`. Raises
    BenchmarkError where memory is too small for it."""
    from lora_moe_rl.verify import hf

    model = hf.load_exact(folder)
    if model is None:
        raise BenchmarkError("memory is too small for a forward in float64: take fewer --experts")
    return hf.exact_logprobs(model, sequences)


def process_and_own(worker, spec) -> tuple[int, int]:
    """The process of a trainer rank that has started, and the bytes of the base that it has beside
    the file."""
    parameters = (p for chunk in worker.engine.chunks for p in chunk.parameters())
    frozen = (parameter for parameter in parameters if not parameter.requires_grad)
    return os.getpid(), outside(frozen, Path(worker.held) / BIN)


def trainer(config: RunConfig, folder: Path, held: str | None) -> Result:
    """The figures of all trainer ranks together, from their start on."""
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


def engine(
    folder: Path,
    config: RunConfig,
    spec,
    sequences: list[list[int]],
    held: str | None,
    others: Sequence[int] = (),
) -> Result:
    """What an engine computes and holds, and of the file with `others`."""
    made = functools.partial(CountingEngine, held=held)
    with EngineProcess(config, spec, folder, folder / "engine.log", made) as process:
        started = process.start()
        scores = _scores(process, sequences)
        parent = psutil.Process(process.pid)
        mine = [parent.pid, *(child.pid for child in parent.children(recursive=True))]
        found: Result = {
            "scores": scores,
            "private": sum(private_bytes(pid) for pid in mine),
            "load": started["seconds"]["total"] - started["seconds"]["import"],
        }
        if held is None:
            found["kernels"] = process.ask("multiply_as_held")
            found["as_held"] = _scores(process, sequences)
        else:
            file = Path(held) / BIN
            found["file"] = sum(mapped_bytes(pid, file) for pid in [*mine, *others])
            found["beside"] = process.ask("own_base", str(file))
    return found


def _scores(engine: EngineProcess, sequences: list[list[int]]) -> list[np.ndarray]:
    """One sequence after the other: which of several an engine takes into one step is chance, and
    the sums of a product depend on how many rows it has."""
    return [engine.ask("score", [one], None)[0][0] for one in sequences]
