"""All trainer ranks as one, as long as none dies: see `lasting_trainer.py` for what then."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.algorithms.base import Pass
from lora_moe_rl.cluster import stacks
from lora_moe_rl.cluster.actors import Actor, answers, get
from lora_moe_rl.cluster.logged_worker import LoggedWorker
from lora_moe_rl.cluster.placement import Placement
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.shares import shares
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.errors import DiskError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.files.trainer_state import Saved
from lora_moe_rl.ports import Ref
from lora_moe_rl.refit.parts import PartLayout, SentPart
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.rollout.facts import Dtype
from lora_moe_rl.trainer.environment import CPU_ENVIRONMENT, threads_of

Tensors = dict[str, np.ndarray]


def rank_threads(config: RunConfig, cores: int, hidden_size: int) -> int:
    """Threads of a rank on the CPU: its share of the cores, without those that engines compute on
    at the same time; one for a model for which more do not help."""
    rollout = config.rollout
    engines = config.num_engines * rollout.ranks * rollout.cpu_threads if config.schedule.lag else 0
    return threads_of((cores - engines) // config.trainer.world_size, hidden_size)


class TrainerRanks:
    """All trainer ranks as one; `start_async` and `wait_started` come first, and `prepare_refit`
    where versions are to be sent to engines."""

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        run_dir: RunDir,
        placement: Placement,
        held: str | None = None,
    ):
        """`held`: the folder of the base that ranks and engines share, if they do."""
        self.config, self.spec, self.model_dir, self.run_dir = config, spec, model_dir, run_dir
        self.placement, self.timeout, self.held = placement, config.trainer.timeout_s, held
        self._starting: list[Any] = []
        self._ahead: list[Any] = []  # calls that nobody has waited for yet
        self.prepared: tuple[list[PartLayout], Channel] | None = None
        self._frozen: Callable[[], Tensors] | None = None
        self.sources: set[int] = set()  # ranks that send parts, where versions are sent
        self.actors = self._make_actors()

    def _make_actors(self) -> list[Actor]:
        environment = {} if self.placement.trainer_gpus else CPU_ENVIRONMENT
        worker = ray.remote(LoggedWorker)
        actors = []
        for rank in range(self.config.trainer.world_size):
            name = f"trainer-{rank}"
            log = str(self.run_dir.log_path(name))
            made = worker.options(**self.placement.trainer(rank))
            parts = (self.config, self.spec, self.model_dir, rank, self.held)
            handle = made.remote(log, environment, *parts)
            actors.append(Actor(handle, name, self.run_dir))
        return actors

    def _all(self, method: str, *args: Any) -> list[Any]:
        return [actor.remote(method, *args) for actor in self.actors]

    @property
    def starting(self) -> dict[str, Any | None]:
        """The call that starts each actor, by the actor's name."""
        calls = self._starting or [None] * len(self.actors)
        return {actor.name: ref for actor, ref in zip(self.actors, calls, strict=True)}

    def start_async(self) -> None:
        first = self.actors[:1]
        (address,) = get(first, [first[0].remote("address")], self.config.trainer.start_timeout_s)
        hidden_size = self.spec.shape.hidden_size
        threads = rank_threads(self.config, len(os.sched_getaffinity(0)), hidden_size)
        self._starting = self._all("start", address, threads)

    def wait_started(self) -> list[dict]:
        facts = get(self.actors, self._starting, self.config.trainer.start_timeout_s)
        self.dtype: Dtype = facts[0]["dtype"]
        self.dp_ranks: list[int] = [one["dp_rank"] for one in facts]
        return facts

    @property
    def places(self) -> list[stacks.Place]:
        return [actor.place for actor in self.actors]

    def end(self) -> None:
        """Ends all ranks at once."""
        for actor in self.actors:
            actor.end()

    def start_anew(self) -> None:
        """Starts others in the places of ranks that were ended. They hold what a run begins with.
        Raises ActorSilent when one takes longer than trainer.start_timeout_s, and RunDirError when
        what they are measured against is no longer there."""
        self.actors, self._ahead = self._make_actors(), []
        self.start_async()
        self.wait_started()
        if self._frozen is not None:
            self.set_reference(self._frozen)
        if self.prepared is not None:
            self.prepare_refit(*self.prepared)

    async def update(
        self, batch: TrainBatch, routes: Sequence[Ref]
    ) -> tuple[UpdateResult, list[Ref]]:
        """Sending the new version is queued behind the update, so that it costs no round trip."""
        of_dp, every = [ray.put(one) for one in shares(batch, self.config)], ray.put(list(routes))
        refs = [
            actor.remote("update", of_dp[rank], every)
            for actor, rank in zip(self.actors, self.dp_ranks, strict=True)
        ]
        parts = await self.send()
        return (await answers(self.actors, refs, self.timeout))[0], parts

    async def copy(self) -> list[Ref]:
        """References to a copy of what `save` writes, a part of each rank's: in Ray's object store,
        where it outlives the ranks."""
        asked = [actor.remote("copy", num_returns=2) for actor in self.actors]
        await answers(self.actors, [size for size, _ in asked], self.timeout)
        return [part for _, part in asked]

    def load_copy(self, parts: Sequence[Ref]) -> None:
        get(self.actors, self._all("load_copy", *parts), self.timeout)

    async def check_alive(self) -> None:
        """Raises ActorFailed when a rank has died, ActorSilent when one does not answer."""
        await answers(self.actors, self._all("version"), self.timeout)

    def prepare_refit(self, layouts: list[PartLayout], channel: Channel) -> None:
        self.prepared = layouts, channel
        self.sources = {layout.source for layout in layouts}
        get(self.actors, self._all("prepare_refit", layouts, channel), self.timeout)

    @property
    def parts_last(self) -> bool:
        """Whether parts that were sent are still there when the ranks are not."""
        return self.prepared is None or self.prepared[1].parts_last

    async def send(self) -> list[Ref]:
        return self.send_now()

    def send_now(self) -> list[Ref]:
        return [actor.remote("send") for actor in self._senders]

    async def sent(self, parts: Sequence[Ref]) -> list[SentPart]:
        return await answers(self._senders, parts, self.timeout)

    def sent_now(self, parts: Sequence[Ref]) -> list[SentPart]:
        """The same, in a thread without an event loop."""
        return get(self._senders, parts, self.timeout)

    @property
    def _senders(self) -> list[Actor]:
        return [actor for rank, actor in enumerate(self.actors) if rank in self.sources]

    async def score(
        self, sequences: Sequence[Sequence[int]], routes: Ref | None, adapters: bool = True
    ) -> list[np.ndarray]:
        before, self._ahead = self._ahead, []  # whose error, if there is one, says what went wrong
        refs = self._all("score", sequences, routes, adapters)
        await answers(self.actors[: len(before)], before, self.timeout)
        found = await answers(self.actors, refs, self.timeout)
        (scores,) = [one for one in found if one is not None]
        return scores

    async def judge(self, batch: TrainBatch) -> dict[Pass, list[np.ndarray]]:
        refs = self._all("judge", ray.put(batch))
        found = await answers(self.actors, refs, self.timeout)
        return found[0]

    async def score_ahead(self, sequences: Sequence[Sequence[int]]) -> None:
        self._ahead = self._all("score_ahead", sequences)

    def save(self, directory: Path) -> Saved:
        """Every rank writes its files. Where the disk refuses one, the others have ended too before
        DiskError is raised."""
        refs = self._all("save", directory)
        try:
            parts = get(self.actors, refs, self.timeout)
            return Saved(parts[0].meta, {k: v for part in parts for k, v in part.files.items()})
        except DiskError:
            ray.wait(refs, num_returns=len(refs), timeout=self.timeout)
            raise

    def set_adapter(self, tensors: dict[str, np.ndarray]) -> None:
        """Starts from whole canonical tensors."""
        get(self.actors, self._all("set_adapter", ray.put(tensors)), self.timeout)

    def set_reference(self, read: Callable[[], Tensors]) -> None:
        """`read` gives whole canonical tensors of the frozen adapter that the policy is measured
        against, now and whenever ranks are started anew."""
        self._frozen = read
        get(self.actors, self._all("set_reference", ray.put(read())), self.timeout)

    def load(self, directory: Path, meta: dict) -> None:
        get(self.actors, self._all("load", directory, meta), self.timeout)
