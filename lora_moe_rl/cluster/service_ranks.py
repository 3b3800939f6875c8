"""The trainer's ranks as a training service asks them: see `trainer/service_models.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from lora_moe_rl.cluster.actors import answers, get
from lora_moe_rl.cluster.trainer import TrainerRanks
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.shares import shares
from lora_moe_rl.files.trainer_state import Saved
from lora_moe_rl.ports import Ref
from lora_moe_rl.router_replay.travel import SentRoutes


class ServiceRanks:
    """All ranks as one; every call is one of `Models`, on all of them together."""

    def __init__(self, ranks: TrainerRanks):
        self.ranks, self.config = ranks, ranks.config

    async def create(self, model: str, seed: int, ranks: Mapping[str, int], factor: float) -> None:
        await self._models("create", model, seed, dict(ranks), factor)

    async def select(self, model: str) -> None:
        await self._models("select", model)

    async def keep(self, model: str, copy: str) -> None:
        await self._models("keep", model, copy)

    async def forget(self, model: str) -> None:
        await self._models("forget", model)

    async def forget_gradient(self, model: str) -> None:
        await self._models("forget_gradient", model)

    async def step(self, model: str, *how: Any) -> dict[str, float]:
        return (await self._models("step", model, *how))[0]

    async def forward(
        self,
        model: str,
        loss: str,
        settings: Mapping[str, float],
        backward: bool,
        batch: TrainBatch,
        routes: Sequence[SentRoutes],
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """(Logprobs of each sample's targets, float32 [R]; metrics)."""
        of_dp, every = [ray.put(one) for one in shares(batch, self.config)], ray.put(list(routes))
        asked = "forward", model, loss, dict(settings), backward
        refs = [
            actor.remote("of_models", *asked, of_dp[rank], every)
            for actor, rank in zip(self.ranks.actors, self.ranks.dp_ranks, strict=True)
        ]
        found = await answers(self.ranks.actors, refs, self.ranks.timeout)
        logprobs = {number: values for mine, _ in found for number, values in mine.items()}
        return [logprobs[number] for number in range(len(batch))], found[0][1]

    async def send_as(self, version: int) -> list[Ref]:
        """Parts of the model that was selected last, as this version."""
        asked = [actor.remote("served_as", version) for actor in self.ranks.actors]
        await answers(self.ranks.actors, asked, self.ranks.timeout)
        return await self.ranks.send()

    def save(self, directory: Path) -> Saved:
        """As `TrainerRanks.save`: what was selected last."""
        return self.ranks.save(directory)

    def load(
        self, directory: Path, meta: dict[str, Any], model: str, factor: float, optimizer: bool
    ) -> None:
        """What a checkpoint holds is this model from now on. Blocks."""
        self._blocking("leave")
        self.ranks.load(directory, meta)
        self._blocking("adopt", model, factor, optimizer)

    async def _models(self, method: str, *args: Any) -> list[Any]:
        refs = [actor.remote("of_models", method, *args) for actor in self.ranks.actors]
        return await answers(self.ranks.actors, refs, self.ranks.timeout)

    def _blocking(self, method: str, *args: Any) -> None:
        refs = [actor.remote("of_models", method, *args) for actor in self.ranks.actors]
        get(self.ranks.actors, refs, self.ranks.timeout)
