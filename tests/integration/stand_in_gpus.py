"""An engine and trainer ranks on GPUs that are names: memory of mapped files takes the place of
CUDA's, and everything else is what runs on GPUs. Patched in processes of their own alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from mapped_files import Files
from ranks import random_adapter, random_batch, spec_of

from lora_moe_rl.config import RunConfig
from lora_moe_rl.rollout.engine import RolloutEngine


def port(folder: str, gpu: int) -> Files:
    memory = Path(folder) / "memory"
    memory.mkdir(exist_ok=True)
    return Files(memory, f"GPU-{gpu}")


class SharingEngine(RolloutEngine):
    """Worker r is on GPU-r."""

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        extension = {"worker_extension_cls": "stand_in_workers.SharingReceiver"}
        return super()._engine_args(cpu) | extension


class SharingRank:
    """A trainer rank on the GPU that `gpus` has for it, in its process."""

    def __init__(
        self,
        rank: int,
        address: str,
        config: RunConfig,
        folder: Path,
        held: str | None,
        gpus: list[int],
    ):
        from lora_moe_rl.trainer.worker import TrainerWorker

        if held is not None:
            _place(held, gpus[rank])
        self.spec = spec_of(folder, config)
        self.worker = TrainerWorker(config, self.spec, folder, rank, held)
        self.worker.start(address, 1)

    def compute(self) -> tuple:
        """Scores under an adapter, and gradients."""
        batch, table = random_batch(self.spec)
        self.worker.set_adapter(random_adapter(self.spec))
        scores = self.worker.score([row.tolist() for row in batch.token_ids], None, adapters=True)
        return scores, [shard.data for shard in self.worker.gradients(batch, table)[2]]

    def own(self) -> set[str]:
        """Frozen parameters that lie in no memory of an engine, by the last of their names."""
        shared = self.worker.engine.shared
        assert shared is not None
        theirs = {t.untyped_storage().data_ptr() for t in shared.store.tensors.values()}
        return {
            name.removesuffix(".weight").removesuffix(".base").rpartition(".")[2]
            for chunk in self.worker.engine.chunks
            for name, value in chunk.named_parameters()
            if not value.requires_grad and value.untyped_storage().data_ptr() not in theirs
        }

    def check(self) -> None:
        """As after some steps."""
        shared = self.worker.engine.shared
        assert shared is not None
        for _ in shared.store.contents.tensors:
            shared.check()

    def shutdown(self) -> None:
        os._exit(0)


def _place(folder: str, gpu: int) -> None:
    from lora_moe_rl.base import shared

    upstream = shared.Shared.of

    def of(held, config, device):
        return upstream(replace(held, gpu=True), config, "cuda")

    shared.Shared.of = of
    shared.Cuda = lambda: port(folder, gpu)
