"""The trainer as the run sees it: all ranks as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.actors import Actor, answers, get
from lora_moe_rl.cluster.log import redirect
from lora_moe_rl.cluster.placement import Placement
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import UpdateResult
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.ports import Ref
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.rollout.facts import Dtype
from lora_moe_rl.trainer.environment import CPU_ENVIRONMENT
from lora_moe_rl.trainer.worker import TrainerWorker

if TYPE_CHECKING:
    from lora_moe_rl.router_replay.routes import Sent


class LoggedWorker(TrainerWorker):
    """A rank whose output goes to its log file."""

    def __init__(self, log_path: str, *args: Any):
        redirect(log_path)
        super().__init__(*args)

    def update(self, batch: TrainBatch, routes: list[Sent]) -> UpdateResult:
        """`routes` come as one object: there are as many as groups."""
        return super().update(batch, *routes)


class TrainerRanks:
    """All trainer ranks as one; `start_async`, `wait_started` and `prepare_refit` come first."""

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        run_dir: RunDir,
        placement: Placement,
    ):
        self.config, self.spec = config, spec
        self._starting: list[Any] = []
        environment = {} if placement.trainer_gpus else {"env_vars": CPU_ENVIRONMENT}
        worker = ray.remote(runtime_env=environment)(LoggedWorker)
        self.actors = []
        for rank in range(config.trainer.world_size):
            name = f"trainer-{rank}"
            log = str(run_dir.log_path(name))
            place = placement.trainer(rank)
            handle = worker.options(**place).remote(log, config, spec, model_dir, rank)
            self.actors.append(Actor(handle, name, run_dir))

    def _all(self, method: str, *args: Any) -> list[Any]:
        return [actor.remote(method, *args) for actor in self.actors]

    @property
    def starting(self) -> dict[str, Any | None]:
        """By actor, the call that starts it."""
        calls = self._starting or [None] * len(self.actors)
        return {actor.name: ref for actor, ref in zip(self.actors, calls, strict=True)}

    def start_async(self) -> None:
        (address,) = get(self.actors[:1], [self.actors[0].remote("address")])
        threads = max(1, len(os.sched_getaffinity(0)) // len(self.actors))
        self._starting = self._all("start", address, threads)

    def wait_started(self) -> list[dict]:
        facts = get(self.actors, self._starting)
        self.dtype: Dtype = facts[0]["dtype"]
        return facts

    async def update(
        self, batch: TrainBatch, routes: Sequence[Ref]
    ) -> tuple[UpdateResult, list[Ref]]:
        """Sending the new version is queued behind the update, so that it costs no round trip."""
        refs = self._all("update", ray.put(batch), ray.put(list(routes)))
        parts = await self.send()
        return (await answers(self.actors, refs))[0], parts

    def prepare_refit(self, layouts: list[PartLayout], channel: Channel) -> None:
        self.sources = {layout.source for layout in layouts}
        get(self.actors, self._all("prepare_refit", layouts, channel))

    async def send(self) -> list[Ref]:
        return [actor.remote("send") for actor in self._senders]

    async def sent(self, parts: Sequence[Ref]) -> list[SentPart]:
        return await answers(self._senders, parts)

    @property
    def _senders(self) -> list[Actor]:
        return [actor for rank, actor in enumerate(self.actors) if rank in self.sources]

    def adapter(self) -> dict[str, np.ndarray]:
        parts = get(self.actors, self._all("export"))
        return assemble(self.spec.tensor_shapes, [shard for part in parts for shard in part])

    async def score(
        self, sequences: Sequence[Sequence[int]], routes: Ref | None, adapters: bool = True
    ) -> list[np.ndarray]:
        refs = self._all("score", sequences, routes, adapters)
        (scores,) = [found for found in await answers(self.actors, refs) if found is not None]
        return scores

    def save(self, directory: Path) -> dict:
        """Every rank writes its file; returns what the checkpoint's manifest must hold."""
        return get(self.actors, self._all("save", directory))[0]

    def set_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Starts from whole canonical tensors."""
        get(self.actors, self._all("set_adapter", ray.put(tensors)))

    def load(self, directory: Path, meta: dict) -> None:
        get(self.actors, self._all("load", directory, meta))
