"""What the processes of `verify refit` do: a trainer rank and an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.refit.transports import Channel, place
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
        return place()

    def set_adapter(self, tensors: Tensors) -> None:
        self.worker.set_adapter(tensors)

    def send(self, version: int, layouts: list[PartLayout], channel: Channel) -> SentPart | None:
        """This rank's part of the adapter as `version`, if the plan wants one of it."""
        self.worker.engine.version = version
        self.worker.prepare_refit(layouts, channel)
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
