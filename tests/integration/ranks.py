"""Runs trainer ranks as processes of their own, without Ray, and collects what they return."""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch.multiprocessing as mp

from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import RunConfig
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.tiny.make import check_model_dir
from lora_moe_rl.trainer.batch import TrainBatch

TIMEOUT_S = 240
Job = Callable[..., Any]


def spec_of(model_dir: Path, config: RunConfig) -> AdapterSpec:
    return AdapterSpec.build(ModelShape.from_hf_config(check_model_dir(model_dir)), config.adapter)


def run_ranks(config: RunConfig, model_dir: Path, job: Job, *args: Any) -> list[Any]:
    """`job(worker, spec, *args)` on every rank of the layout; results in rank order."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    ranks = range(config.trainer.world_size)
    source = (inspect.getsourcefile(job), job.__name__)
    processes = [
        context.Process(target=_rank, args=(rank, address, config, model_dir, source, args, queue))
        for rank in ranks
    ]
    for process in processes:
        process.start()
    try:
        results = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(results) < len(ranks):
            try:
                rank, result, error = queue.get(timeout=1)
            except Empty:
                died = [r for r in ranks if processes[r].exitcode and r not in results]
                assert not died, f"ranks {died} ended without a result"
                assert time.monotonic() < deadline, "the ranks do not answer"
                continue
            assert error is None, f"rank {rank}:\n{error}"
            results[rank] = result
        return [results[rank] for rank in ranks]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _rank(rank, address, config, model_dir, source, args, queue) -> None:
    from lora_moe_rl.trainer.worker import TrainerWorker

    try:
        job = _load(*source)
        spec = spec_of(model_dir, config)
        worker = TrainerWorker(config, spec, model_dir, rank)
        worker.start(address, threads=1)
        queue.put((rank, job(worker, spec, *args), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    os._exit(0)  # gloo's threads would wait for ranks that have ended


def _load(path: str, name: str) -> Job:
    """A function of a test file, which another process cannot import by pytest's name for it."""
    module_spec = importlib.util.spec_from_file_location("rank_job", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return getattr(module, name)


def random_adapter(spec: AdapterSpec, seed: int = 1) -> dict[str, np.ndarray]:
    """Canonical tensors with a B that is not zero, so that every factor has a gradient."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.005 if name.endswith("B") else 0.1, shape).astype(np.float32)
        for name, shape in spec.tensor_shapes.items()
    }


def random_batch(spec: AdapterSpec, samples: int = 11, seed: int = 0):
    """(TrainBatch, RouteTable): sequences of uneven length with random, valid routes."""
    rng = np.random.default_rng(seed)
    shape = spec.shape
    ids = [
        rng.integers(0, shape.vocab_size, int(n)).astype(np.int32)
        for n in rng.integers(6, 17, samples)
    ]
    prompts = np.array([int(rng.integers(1, len(i) - 1)) for i in ids])
    batch = TrainBatch(
        token_ids=ids,
        prompt_lengths=prompts,
        logprobs=[rng.normal(-5, 1, len(i) - p).astype(np.float32) for i, p in zip(ids, prompts)],
        advantages=rng.normal(0, 1, samples).astype(np.float32),
        weights=np.ones(samples, np.float32),
        mini_batch=np.zeros(samples, np.int64),
    )
    keys = rng.random((sum(len(i) - 1 for i in ids), len(shape.moe_layers), shape.num_experts))
    routes = np.argsort(keys, axis=-1)[..., : shape.top_k]
    lengths = [len(i) - 1 for i in ids]
    rows = np.split(routes, np.cumsum(lengths)[:-1])
    table = RouteTable.build(rows, lengths, shape.moe_layers, shape.num_experts, shape.top_k)
    return batch, table
