"""What the processes of `verify refit` do: a trainer rank, an engine and its workers, and Hugging
Face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.refit.transports.choose import Wire
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.router_replay.table import RouteTable

WORKER = "lora_moe_rl.verify.refit_worker.VerifiedReceiver"
FILES_ID = 1_000_000  # far from the ids of our versions
Tensors = dict[str, np.ndarray]


class RankJob:
    """One trainer rank: a worker, as a run has it."""

    def __init__(self, worker, spec: AdapterSpec):
        self.worker, self.spec = worker, spec

    def place(self) -> str:
        from lora_moe_rl.refit.transports import shm

        return shm.place()

    def set_adapter(self, tensors: Tensors) -> None:
        self.worker.set_adapter(tensors)

    def send(self, version: int, layouts: list[PartLayout], wire: Wire) -> SentPart | None:
        """This rank's part of the adapter as `version`, if the plan wants one of it."""
        self.worker.engine.version = version
        self.worker.prepare_refit(layouts, wire)
        if self.worker.rank not in {layout.source for layout in layouts}:
            return None
        return self.worker.send()

    def score(self, sequences: list[list[int]], table: RouteTable) -> list[np.ndarray] | None:
        return self.worker.score(sequences, table, True)


class VerifiedEngine(RolloutEngine):
    """Can also take an adapter from files, by vLLM's own loader, and compare the slots."""

    def _engine_args(self, cpu: bool) -> dict[str, Any]:
        return super()._engine_args(cpu) | {"worker_extension_cls": WORKER}

    async def load_files(self, directory: str) -> None:
        from vllm.lora.request import LoRARequest

        await self.llm.add_lora(LoRARequest("from files", FILES_ID, directory))

    async def unlike_files(
        self, version: int, names: Mapping[tuple[str, int], str], tolerance: float
    ) -> list[dict[str, Any]]:
        """Where the slot of `version` and that of the adapter from files differ. `names`: the site
        of (vLLM's module, part)."""
        told = [[*place, name] for place, name in names.items()]
        answers = await self._workers("verify_unlike", version, FILES_ID, told, tolerance)
        return [fault for answer in answers for fault in answer["unlike"]]


@dataclass
class Reference:
    """Hugging Face's. `sequences` were sampled from the merged model; `merged` and `base` are the
    logprobs `[L - 1]` of each, with the adapter merged into the weights by hand and without."""

    sequences: list[list[int]]
    merged: list[np.ndarray]
    base: list[np.ndarray]


def reference(
    rank: int, model_dir: Path, spec: AdapterSpec, tensors: Tensors, lengths: list[int], seed: int
) -> Reference:
    """A process's job. The model's own samples, since unlikely tokens have large logits, in which
    the last bit of float32 is worth more."""
    from lora_moe_rl.verify import hf

    model = hf.load(model_dir)
    hf.merge(model, spec, tensors)
    sequences = _sample(model, lengths, seed)
    merged = [hf.logprobs(model, sequence) for sequence in sequences]
    del model
    model = hf.load(model_dir)
    return Reference(sequences, merged, [hf.logprobs(model, s) for s in sequences])


def _sample(model, lengths: list[int], seed: int) -> list[list[int]]:
    """Sequences that begin with a random token."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (len(lengths), 1), generator=generator)
    with torch.no_grad():
        while ids.shape[1] < max(lengths):
            chances = model(ids).logits[:, -1].float().softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
    return [row[:length] for row, length in zip(ids.tolist(), lengths, strict=True)]
