"""The trainer as the controller sees it: all ranks as one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import ray

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.actors import Actor, get
from lora_moe_rl.cluster.log import redirect
from lora_moe_rl.cluster.placement import Placement
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.trainer.environment import CPU_ENVIRONMENT
from lora_moe_rl.trainer.worker import TrainerWorker


class LoggedWorker(TrainerWorker):
    """A rank whose output goes to its log file."""

    def __init__(self, log_path: str, *args: Any):
        redirect(log_path)
        super().__init__(*args)


class TrainerGroup:
    """`start_async` and `wait_started` come first. Arguments named `*_refs` are Ray object
    references: the data goes from its maker to the ranks, not through the controller."""

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        run_dir: RunDir,
        placement: Placement,
    ):
        self.config, self.spec = config, spec
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

    def start_async(self) -> None:
        (address,) = get(self.actors[:1], [self.actors[0].remote("address")])
        threads = max(1, len(os.sched_getaffinity(0)) // len(self.actors))
        self._starting = self._all("start", address, threads)

    def wait_started(self) -> list[dict]:
        return get(self.actors, self._starting)

    def update(self, batch: TrainBatch, table_refs: list[Any]):
        """One step. Returns an UpdateResult, and references to what each rank sends of the new
        version: sending is queued behind the update, so that it costs no round trip."""
        batch_ref = ray.put(batch)
        refs = self._all("update", batch_ref, *table_refs)
        sent = self.send()
        return get(self.actors, refs)[0], sent

    def prepare_refit(self, layouts: list[PartLayout], channel: Channel) -> None:
        self.sources = {layout.source for layout in layouts}
        get(self.actors, self._all("prepare_refit", layouts, channel))

    def send(self) -> list[Any]:
        """References to what each rank sends of the current version."""
        return [
            actor.remote("send") for rank, actor in enumerate(self.actors) if rank in self.sources
        ]

    def sent(self, sent_refs: list[Any]) -> list[SentPart]:
        """What `send` and `update` return references to, once all of it is sent."""
        return get([self.actors[rank] for rank in sorted(self.sources)], sent_refs)

    def adapter(self) -> dict[str, np.ndarray]:
        """The whole current adapter, canonical, on this host."""
        parts = get(self.actors, self._all("export"))
        return assemble(self.spec.tensor_shapes, [shard for part in parts for shard in part])

    def score(self, sequences, table_ref: Any, adapters: bool = True) -> list[np.ndarray]:
        """Logprobs of every token after the first, at temperature 1, with the engine's routes."""
        answers = get(self.actors, self._all("score", sequences, table_ref, adapters))
        (scores,) = [answer for answer in answers if answer is not None]
        return scores

    def save(self, directory: Path) -> dict:
        """Every rank writes its file; returns what the checkpoint's manifest must hold."""
        return get(self.actors, self._all("save", directory))[0]

    def set_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Starts from whole canonical tensors."""
        get(self.actors, self._all("set_adapter", ray.put(tensors)))

    def load(self, directory: Path, meta: dict) -> None:
        get(self.actors, self._all("load", directory, meta))
