"""The rollout engines as the run sees them: all replicas as one.

An engine whose processes have died is started anew, up to rollout.max_restarts times a run:

    start ──> prepare its refit ──> publish the newest version ──> prove it ──> ask again

One that comes back while the trainer updates has no parts to take: it waits for the next version,
which all take together.

Tickets that it was rolling go back to the book, and to whichever engine is free; all else that it
was asked is asked again. Samples depend on their seed alone, and a version is published in full or
not at all, so that nothing depends on who answers. The other engines go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.actors import Actor, answer, get
from lora_moe_rl.cluster.placement import Placement
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Sample
from lora_moe_rl.errors import ActorFailed, EngineDied, LoraMoeRlError
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.ports import Receipt, Ref, Scored, Watch
from lora_moe_rl.refit.parts import PartLayout
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.rollout.merged import MergedRolloutEngine

PUBLISH_POLL_S = 0.05
REFIT_GRACE_S = 10  # an engine that gives up by itself says more than one that is given up

log = logging.getLogger(__name__)


class RolloutEngines:
    """All rollout engines as one; `start_async`, `wait_started` and `prepare_refit` come first.

    `prove(index, version)` is awaited for an engine that came back, and raises RefitError when it
    does not serve the version.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        run_dir: RunDir,
        placement: Placement,
    ):
        self.config, self.spec, self.model_dir, self.run_dir = config, spec, model_dir, run_dir
        self.placement = placement
        self._starting: list[Any] = []
        self.prove: Callable[[int, int], Awaitable[None]] | None = None
        self.restarts = 0
        self.prepared: tuple[list[PartLayout], Channel] | None = None
        self.published: tuple[int, Sequence[Ref]] | None = None  # by all: a version, its parts
        self.actors = [self._actor(index) for index in range(config.rollout.engines)]
        self.rolling = [0] * len(self.actors)  # requests for samples in flight
        self.returning: dict[int, asyncio.Task[None]] = {}  # engines that are being started anew
        self.empty: set[int] = set()  # engines that serve no version until the next is published
        self.oldest = [-1] * len(self.actors)  # the oldest version that each can serve

    def _actor(self, index: int) -> Actor:
        merged = self.config.refit.mode == "merged"
        engine_class = MergedRolloutEngine if merged else RolloutEngine
        engine = ray.remote(engine_class).options(**self.placement.engine(index))
        name = f"engine-{index}"
        log_path = str(self.run_dir.log_path(name))
        handle = engine.remote(self.config, str(self.model_dir), self.spec, index, log_path)
        return Actor(handle, name, self.run_dir)

    @property
    def starting(self) -> dict[str, Any | None]:
        """By actor, the call that starts it."""
        calls = self._starting or [None] * len(self.actors)
        return {actor.name: ref for actor, ref in zip(self.actors, calls, strict=True)}

    def start_async(self) -> None:
        self._starting = [actor.remote("start") for actor in self.actors]

    def wait_started(self) -> list[dict]:
        return get(self.actors, self._starting, self.config.rollout.start_timeout_s)

    def prepare_refit(self, layouts: list[PartLayout], channel: Channel) -> None:
        get(self.actors, [actor.remote("prepare_refit", layouts, channel) for actor in self.actors])
        self.prepared = layouts, channel

    def policy(self, version: int, seed: int, watch: Watch = nullcontext) -> TicketPolicy:
        return TicketPolicy(self, version, seed, watch)

    async def sample(
        self,
        token_ids: Sequence[int],
        n: int,
        version: int,
        seed: int,
        watch: Watch,
    ) -> tuple[list[Sample], Ref]:
        """Asks the engine that has least to do. Raises EngineDied when it dies over it; it comes
        back by itself, and its death is counted once, however many were waiting for it."""
        index = await self._free_engine(version)
        actor = self.actors[index]
        self.rolling[index] += 1
        try:
            with watch(index):
                return await answer(actor, actor.remote("sample", token_ids, n, version, seed))
        except LoraMoeRlError as error:
            if not _is_death(error):
                raise
            if actor is self.actors[index] and index not in self.returning:
                self._count(index, error)
                self.returning[index] = asyncio.create_task(self._bring_back(index))
            raise EngineDied(str(error)) from error
        finally:
            self.rolling[index] -= 1

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        version: int | None,
        engines: Sequence[int] | None = None,
    ) -> list[Scored]:
        """Routes stay where they are; what says whether they are equal comes along."""
        indices = range(len(self.actors)) if engines is None else engines
        asked = (self._ask(i, "probe", sequences, version, num_returns=2) for i in indices)
        refs = await asyncio.gather(*asked)
        found = ray.get([scores for scores, _ in refs])
        return [
            Scored(logprobs, table, checksum, complete)
            for (logprobs, checksum, complete), (_, table) in zip(found, refs, strict=True)
        ]

    async def publish(self, version: int, parts: Sequence[Ref]) -> list[Receipt]:
        """Every engine takes the version, or the run stops. The parts stay as they are until the
        next version: engines that come back take it from them too."""
        await self.all_back()
        self.published = None
        asked = (
            self._ask(index, "publish", version, *parts, timeout=self._refit_timeout)
            for index in range(len(self.actors))
        )
        refs = await asyncio.gather(*asked)
        self.published = version, parts
        for index in self.empty:
            self.oldest[index] = version
        self.empty.clear()
        return ray.get([ref for (ref,) in refs])

    def overwrite(self) -> None:
        self.published = None

    async def differing(
        self, version: int, parts: Sequence[Ref], engines: Sequence[int] | None = None
    ) -> list[str]:
        indices = range(len(self.actors)) if engines is None else engines
        asked = (
            self._ask(index, "differing", version, *parts, timeout=self._refit_timeout)
            for index in indices
        )
        refs = await asyncio.gather(*asked)
        return sorted({name for names in ray.get([ref for (ref,) in refs]) for name in names})

    async def roll_back(self, version: int, parts: Sequence[Ref]) -> list[str]:
        found = await self._each("differing", version, *parts)
        await self._each("drop", version)
        return sorted({name for names in found for name in names})

    @property
    def _refit_timeout(self) -> float:
        """An engine may wait as long for a slot and again for its workers."""
        return 2 * self.config.refit.timeout_s + REFIT_GRACE_S

    async def _each(self, method: str, *args: Any) -> list[Any]:
        return await asyncio.gather(
            *(answer(actor, actor.remote(method, *args)) for actor in self.actors)
        )

    async def _ask(
        self,
        index: int,
        method: str,
        *args: Any,
        num_returns: int = 1,
        timeout: float | None = None,
    ) -> list[Ref]:
        """References to what an engine returns, once it has; an engine that dies is started anew
        and asked again.

        Raises what the engine raises, and ActorFailed when it is silent for `timeout` seconds or
        dies more often than is allowed. (A silent engine is not started anew: it may be busy.)
        """
        while True:
            actor = self.actors[index]
            sent = actor.remote(method, *args, num_returns=num_returns)
            refs = sent if num_returns > 1 else [sent]
            try:
                await answer(actor, refs[0], timeout)
                return refs
            except LoraMoeRlError as error:
                if not _is_death(error):
                    raise
                self._count(index, error)
                await self._bring_back(index)

    async def _free_engine(self, version: int) -> int:
        """The engine with the fewest requests of those that serve a version. Raises EngineDied when
        none does any more, and what kept one from coming back."""
        while True:
            for index, task in list(self.returning.items()):
                if task.done():
                    del self.returning[index]
                    task.result()
            gone = self.empty | self.returning.keys()
            alive = [i for i in range(len(self.actors)) if i not in gone]
            serving = [i for i in alive if self.oldest[i] <= version]
            if serving:
                return min(serving, key=lambda index: self.rolling[index])
            if self.returning and not alive:
                await asyncio.wait(self.returning.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            await asyncio.sleep(PUBLISH_POLL_S)
            if alive:  # the ticket comes again, with the version that is served by then
                raise EngineDied(f"no engine serves version {version} any more")

    async def all_back(self) -> None:
        while self.returning:
            index, task = next(iter(self.returning.items()))
            await asyncio.wait([task])
            if self.returning.get(index) is task:  # until now nobody may be sent there
                del self.returning[index]
            task.result()

    async def _bring_back(self, index: int) -> None:
        """Starts a dead engine anew, until it lives."""
        started = time.perf_counter()
        while True:
            try:
                await self._start_anew(index)
                break
            except LoraMoeRlError as error:
                self._count(index, error)
        served = "" if self.published is None else f" and serves version {self.published[0]}"
        log.warning(
            "engine-%d is back%s, %.1f s later", index, served, time.perf_counter() - started
        )

    def _count(self, index: int, error: LoraMoeRlError) -> None:
        """Counts a death. Raises `error` when it is none, ActorFailed beyond the bound."""
        if not _is_death(error):
            raise error
        actor, limit = self.actors[index], self.config.rollout.max_restarts
        reason = error.reason if isinstance(error, ActorFailed) else str(error)
        if self.restarts >= limit:
            reason += (
                f"; {self.restarts} restarts so far, and rollout.max_restarts={limit} "
                "allows no more. The run can go on with --resume"
            )
            raise ActorFailed(actor.name, reason, self.run_dir.tail(actor.name)) from error
        self.restarts += 1
        log.warning(
            "%s died (%s): starting it anew, restart %d of rollout.max_restarts=%d; its log: %s",
            *(actor.name, reason, self.restarts, limit, self.run_dir.log_path(actor.name)),
        )

    async def _start_anew(self, index: int) -> None:
        ray.kill(self.actors[index].handle)  # may live on around a vLLM that has died
        actor = self.actors[index] = self._actor(index)
        await answer(actor, actor.remote("start"), self.config.rollout.start_timeout_s)
        if self.prepared is not None:
            await answer(actor, actor.remote("prepare_refit", *self.prepared))
        if self.published is not None:
            version, parts = self.published
            self.oldest[index] = version
            await answer(actor, actor.remote("publish", version, *parts), self._refit_timeout)
            if self.prove is not None:
                await self.prove(index, version)
        else:
            self.empty.add(index)


class TicketPolicy:
    """The engines as one ticket sees them."""

    def __init__(self, engines: RolloutEngines, version: int, seed: int, watch: Watch):
        self.engines, self.version, self.seed, self.watch = engines, version, seed, watch

    async def sample(self, token_ids: Sequence[int], n: int) -> tuple[list[Sample], Ref]:
        return await self.engines.sample(token_ids, n, self.version, self.seed, self.watch)


def _is_death(error: LoraMoeRlError) -> bool:
    return isinstance(error, EngineDied) or isinstance(error.__cause__, RayActorError)
