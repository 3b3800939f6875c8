"""Trainer ranks as processes of their own, without Ray, and what they are asked.

On the CPU ranks are forked from a server that has imported everything once; on CUDA, which a
forked process cannot use, each starts anew.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.addresses import reserve
from lora_moe_rl.config import RunConfig
from lora_moe_rl.models.directory import check_model_dir
from lora_moe_rl.verify.processes import Processes, quickest

Job = Callable[..., Any]
_HELD: deque[socket.socket] = deque(maxlen=16)


def spec_of(model_dir: Path, config: RunConfig, servable: bool = False) -> AdapterSpec:
    """What is trained; with `servable`, only what vLLM can serve in slots is allowed. Raises
    ModelError or ConfigError."""
    shape = ModelShape.from_hf_config(check_model_dir(model_dir))
    return AdapterSpec.build(shape, config.adapter, servable=servable)


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
    with Ranks(config, model_dir, cuda, timeout_s) as ranks:
        return ranks.run(job, *args)


class Ranks(Processes):
    """All ranks of a layout, for `timeout_s` at most. A context: they end with it. `held`: see
    `TrainingEngine`."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        cuda: bool,
        timeout_s: float,
        held: str | None = None,
    ):
        self.deadline = time.monotonic() + timeout_s
        size = config.trainer.world_size
        super().__init__(
            [f"rank {rank}" for rank in range(size)],
            _Rank,
            free_address(),
            config,
            model_dir,
            held,
            start=quickest(),
            variables=[{"CUDA_VISIBLE_DEVICES": _gpu(rank)} for rank in range(size)] * cuda,
            as_raised=False,
        )

    def run(self, job: Job, *args: Any) -> list[Any]:
        """As `run_ranks`, with the same workers each time."""
        return self.call("run", job, *args, timeout_s=self.deadline - time.monotonic())


def free_address() -> str:
    """An address where rank 0 can be met: held for it, as are the last some before it."""
    _HELD.append(reserve("127.0.0.1"))
    return f"127.0.0.1:{_HELD[-1].getsockname()[1]}"


def _gpu(rank: int) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[rank] if visible else str(rank)


class _Rank:
    """In a rank's process: a worker, as a run has it."""

    def __init__(
        self, rank: int, address: str, config: RunConfig, model_dir: Path, held: str | None
    ):
        from lora_moe_rl.trainer.environment import threads_of
        from lora_moe_rl.trainer.worker import TrainerWorker

        self.spec = spec_of(model_dir, config)
        self.worker = TrainerWorker(config, self.spec, model_dir, rank, held)
        cores = len(os.sched_getaffinity(0)) // config.trainer.world_size
        self.worker.start(address, threads_of(cores, self.spec.shape.hidden_size))

    def run(self, job: Job, *args: Any) -> Any:
        return job(self.worker, self.spec, *args)

    def shutdown(self) -> None:
        """At once: gloo's threads would wait for ranks that have ended."""
        os._exit(0)
