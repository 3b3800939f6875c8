"""Runs trainer ranks as processes of their own, without Ray, and collects what they return.

On the CPU ranks are forked from a server that has imported everything once; on CUDA, which a
forked process cannot use, each starts anew.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ActorFailed
from lora_moe_rl.models.directory import check_model_dir

Job = Callable[..., Any]
LOG_LINES = 15


def spec_of(model_dir: Path, config: RunConfig) -> AdapterSpec:
    """What is trained, whether or not vLLM could serve it. Raises ModelError or ConfigError."""
    shape = ModelShape.from_hf_config(check_model_dir(model_dir))
    return AdapterSpec.build(shape, config.adapter, servable=False)


def run_ranks(
    config: RunConfig,
    model_dir: Path,
    job: Job,
    *args: Any,
    cuda: bool = False,
    timeout_s: float = 240,
) -> list[Any]:
    """`job(worker, spec, *args)` on every rank of the layout; results in rank order.

    `job` and `args` are pickled. Raises ActorFailed when a rank raises, dies, or does not answer
    within `timeout_s`; the others are ended then.
    """
    size = config.trainer.world_size
    arguments = (free_address(), config, model_dir, job, args)
    return run_processes(size, _worker_job, *arguments, cuda=cuda, timeout_s=timeout_s)


def free_address() -> str:
    """Where rank 0 can be met."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def run_processes(
    size: int, function: Callable[..., Any], *args: Any, cuda: bool, timeout_s: float
) -> list[Any]:
    """`function(rank, *args)` in `size` processes; see `run_ranks`."""
    context = _context(cuda)
    queue = context.Queue()
    with tempfile.TemporaryDirectory(prefix="lora-moe-rl-ranks-") as folder:
        logs = [Path(folder) / f"rank_{rank}.log" for rank in range(size)]
        processes = [
            context.Process(target=_process, args=(rank, logs[rank], cuda, queue, function, args))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            results = _collect(queue, processes, logs, timeout_s)
            for process in processes:
                process.join(5)
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _context(cuda: bool):
    if cuda:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lora_moe_rl.verify.preload"])
    return context


def _collect(queue, processes, logs: list[Path], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(processes):
        try:
            rank, result, error = queue.get(timeout=1)
        except Empty:
            waiting = [r for r in range(len(processes)) if r not in results]
            for r in waiting:
                if processes[r].exitcode:
                    reason = f"it ended with exit code {processes[r].exitcode}"
                    raise ActorFailed(f"rank {r}", reason, _tail(logs[r])) from None
            if time.monotonic() > deadline:
                reason = f"no answer within {timeout_s:.0f} s (rank {waiting} of {len(processes)})"
                raise ActorFailed(f"rank {waiting[0]}", reason, _tail(logs[waiting[0]])) from None
            continue
        if error is not None:
            raise ActorFailed(f"rank {rank}", error.strip().splitlines()[-1], error)
        results[rank] = result
    return [results[rank] for rank in range(len(processes))]


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(lines[-LOG_LINES:])


def _process(rank, log: Path, cuda: bool, queue, function, args) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = _device_of(rank)
    try:
        queue.put((rank, function(rank, *args), None))
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    os._exit(0)  # gloo's threads would wait for ranks that have ended


def _device_of(rank: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[rank] if visible else str(rank)


def _worker_job(rank: int, address: str, config: RunConfig, model_dir: Path, job: Job, args):
    from lora_moe_rl.trainer.worker import TrainerWorker

    spec = spec_of(model_dir, config)
    worker = TrainerWorker(config, spec, model_dir, rank)
    cores = len(os.sched_getaffinity(0))
    worker.start(address, threads=max(1, cores // config.trainer.world_size))
    return job(worker, spec, *args)
