"""Trainer ranks on pretended GPUs (`pretended_gpu.py`), each in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.verify import ranks
from lora_moe_rl.verify.processes import Processes

ENVIRONMENT = {"TRITON_INTERPRET": "1"}  # Triton's kernels run in its interpreter


class Rank(ranks._Rank):
    def __init__(self, *args: Any):
        import pretended_gpu

        pretended_gpu.install()
        super().__init__(*args, None)


def run_pretended(config: RunConfig, model_dir: Path, job, *args: Any) -> list[Any]:
    """As `ranks.run_ranks`, with trainer.device=cuda."""
    size = config.trainer.world_size
    with Processes(
        [f"rank {rank}" for rank in range(size)],
        Rank,
        ranks.free_address(),
        config,
        model_dir,
        variables=[ENVIRONMENT] * size,
        as_raised=False,
    ) as processes:
        return processes.call("run", job, *args, timeout_s=500)
