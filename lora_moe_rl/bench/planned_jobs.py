"""What `bench planned` asks of a trainer rank and of an engine."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.base.store import BIN
from lora_moe_rl.bench.loading import Peak
from lora_moe_rl.bench.planned import SAMPLE, STEP, TOKENS
from lora_moe_rl.bench.process import mapped_bytes, status_bytes
from lora_moe_rl.bench.report import cores
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.rollout.engine import RolloutEngine

M_MMAP_THRESHOLD = -3  # glibc's malloc.h
MAPPED_BYTES = 2**16


def give_back_what_is_freed() -> None:
    """From here on glibc maps every larger block alone, and unmaps it when it is freed. By default
    it keeps blocks of up to 32 MiB for later: a peak would be what it holds, not what is used."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


def settled() -> int:
    """Anonymous memory of this process that is in use: what has been freed goes back to the system
    first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes("RssAnon")


def train(
    rank: int, address: str, config: RunConfig, folder: Path, held: str | None
) -> dict[str, int]:
    """Bytes of a trainer rank by what they are for. A job of `run_processes`."""
    give_back_what_is_freed()
    from lora_moe_rl.trainer.device import Device
    from lora_moe_rl.trainer.environment import without_trackers

    device = Device.choose(config.trainer)
    without_trackers()
    device.prepare(max(1, cores() // config.trainer.world_size))
    from lora_moe_rl.trainer import bridge
    from lora_moe_rl.trainer.engine import TrainingEngine
    from lora_moe_rl.trainer.model import init_process_groups
    from lora_moe_rl.trainer.update import gradients
    from lora_moe_rl.verify.inputs import random_adapter, random_batch
    from lora_moe_rl.verify.ranks import spec_of

    class Watched(TrainingEngine):
        def _build(self, model_dir: Path):
            chunks = super()._build(model_dir)
            self.with_base = settled()
            return chunks

    bridge.load()
    init_process_groups(config.trainer, device, rank, address)
    spec = spec_of(folder, config)
    samples = config.trainer.dp * TOKENS // SAMPLE
    batch, routes = random_batch(spec, samples, 3, (SAMPLE + 1, SAMPLE + 2))
    adapter = random_adapter(spec)
    bare = settled()
    engine = Watched(config, spec, folder, device, held)
    engine.adapters.load(adapter)
    gradients(engine, batch, (routes,))
    engine.optimizer.step()
    kept = settled()
    with Peak() as of_step:
        gradients(engine, batch, (routes,))
        engine.optimizer.step()
    found = {
        "base": engine.with_base - bare,
        "adapter, gradients, moments": kept - engine.with_base,
        STEP: of_step.bytes - kept,
    }
    if held is not None:
        mapped = mapped_bytes(os.getpid(), Path(held) / BIN)
        found |= {"base": found["base"] + mapped, "base, of the file": mapped}
    return found


def hold_samples(config: RunConfig, lengths: Lengths) -> int:
    """Bytes of a step's samples in the process that makes a batch of them: as they come from an
    engine, scored, with the algorithm's signals. A job of `apart`."""
    from lora_moe_rl import algorithms
    from lora_moe_rl.algorithms.parts.step_signals import signals_of
    from lora_moe_rl.data.batch import TrainBatch

    give_back_what_is_freed()
    rng, algorithm = np.random.default_rng(0), config.algorithm
    made = algorithms.make(config)

    def group(row: int) -> Group:
        prompt = Prompt(row, "", rng.integers(0, 1000, lengths.prompt).tolist())
        samples = [_sample(rng, prompt, lengths.response) for _ in range(algorithm.group_size)]
        rewards = np.arange(algorithm.group_size, dtype=np.float32)
        return Group(prompt, pickle.loads(pickle.dumps(samples)), None, rewards)

    def step(prompts: int) -> tuple[Any, ...]:
        groups = [group(row) for row in range(prompts)]
        signals = signals_of(made, groups)
        return groups, signals, TrainBatch.from_groups(groups, signals, algorithm.mini_batches, 1)

    step(algorithm.mini_batches)  # imports what it needs
    bare = settled()
    held = step(algorithm.prompts_per_step)
    found = settled() - bare
    del held
    return found


def _sample(rng: np.random.Generator, prompt: Prompt, response: int) -> Sample:
    """A sample of one turn, with four letters a token."""
    logprobs = rng.standard_normal(response)
    segments = (
        Segment.given("user", prompt.token_ids),
        Segment.sampled(rng.integers(0, 1000, response), logprobs, 3),
    )
    return Sample(segments, "stop", "".join(rng.choice([*"abcdefgh"], 4 * response)))


class HeldEngine(RolloutEngine):
    """Tells what its workers hold."""

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        worker = {"worker_cls": "lora_moe_rl.bench.planned_worker.HeldWorker"}
        return super()._engine_args(cpu) | worker

    async def bytes_held(self) -> list[dict[str, int]]:
        return await self._workers("bytes_held")
