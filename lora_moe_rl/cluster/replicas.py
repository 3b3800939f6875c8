"""Rollout engines that live, die and come back.

One whose processes have died is started anew, up to rollout.max_restarts times a run, and one that
lives but is silent, up to rollout.max_silences times:

    start ──> prepare its refit ──> publish the newest version ──> prove it ──> ask again

One that comes back while the trainer updates has no parts to take: it waits for the next version,
which all take together. Many may wait for an engine when it dies: who notices first counts it and
starts it anew, and the others ask again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ray.exceptions import RayActorError

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster import stacks
from lora_moe_rl.cluster.actors import Actor, answer, get
from lora_moe_rl.cluster.engine_actor import make_engine
from lora_moe_rl.cluster.hearing import heard
from lora_moe_rl.cluster.held_up import HeldUp
from lora_moe_rl.cluster.placement import Placement
from lora_moe_rl.cluster.pulse import Pulse
from lora_moe_rl.cluster.spread_actor import SpreadActor
from lora_moe_rl.cluster.stacks import Place
from lora_moe_rl.cluster.start_order import Starting
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import (
    ActorFailed,
    ActorSilent,
    EngineDied,
    EngineLost,
    EngineSilent,
    LoraMoeRlError,
)
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.ports import Ref
from lora_moe_rl.refit.parts import PartLayout
from lora_moe_rl.refit.transports import Channel
from lora_moe_rl.rollout import outputs

PUBLISH_POLL_S = 0.05
REFIT_GRACE_S = 20  # an engine that gives up by itself says more than one that is given up

# The engine that what runs here brings back.
_BRINGS_BACK: ContextVar[int | None] = ContextVar("brings_back", default=None)

log = logging.getLogger(__name__)


class Replicas:
    """The actors, one an engine; `start_async`, `wait_started` and `prepare_refit` come first.

    `prove(index, version)` is awaited for an engine that came back, and raises RefitError when it
    does not serve the version. `renew()` is awaited when an engine could not take parts, and
    returns True when their senders had died and the parts are others now.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: AdapterSpec,
        model_dir: Path,
        run_dir: RunDir,
        placement: Placement,
        held: str | None = None,
    ):
        """`held`: the folder of the base that engines and trainer share, if they do."""
        self.config, self.spec, self.model_dir, self.run_dir = config, spec, model_dir, run_dir
        self.placement, self.held = placement, held
        self.route_pieces = len(outputs.route_pieces(spec.shape, config.trainer))
        self._starting: Starting | None = None
        self._one_starts = asyncio.Lock()  # where they share GPUs
        self.prove: Callable[[int, int], Awaitable[None]] | None = None
        self.renew: Callable[[], Awaitable[bool]] | None = None
        self.restarts = 0
        self.silences = 0  # of these restarts, those of engines that were silent
        self.given_up: EngineLost | None = None  # which one is not started anew any more
        self.prepared: tuple[list[PartLayout], Channel] | None = None
        self.pinned: int | None = None  # the version that keeps its slot, by all
        self.published: tuple[int, Sequence[Ref]] | None = None  # by all: a version, its parts
        self.actors = {index: self._actor(index) for index in range(config.rollout.firm_engines)}
        most = config.rollout.engines
        self.pulses = [Pulse(config.rollout.silent_s) for _ in range(most)]
        self.rolling = [0] * most  # requests for samples in flight
        self.returning: dict[int, asyncio.Task[None]] = {}  # engines that are being started anew
        self._taken = [asyncio.Event() for _ in range(most)]  # those have the version, unproven
        self._noticed: set[int] = set()  # engines whose actor's death has been noticed
        self.absent = set(range(config.rollout.firm_engines, config.rollout.engines))
        self.empty: set[int] = set()  # engines that serve no version until the next is published
        self.held_up = HeldUp()  # requests for samples
        self.oldest = [-1] * most  # the oldest version that each can serve
        self.newest = -1  # the version under which requests go on, if they are continued

    def _actor(self, index: int) -> Actor:
        parts = (self.config, self.spec, self.model_dir, self.run_dir, self.placement, self.held)
        return make_engine(index, *parts)

    @property
    def further_places(self) -> list[str]:
        """Where ranks run that are not on their engine's own node."""
        spread = [actor for actor in self.actors.values() if isinstance(actor, SpreadActor)]
        return [place for actor in spread for place in actor.places]

    @property
    def starting(self) -> dict[str, Any | None]:
        """The call that starts each actor, by the actor's name."""
        calls = self._starting.calls if self._starting else [None] * len(self.actors)
        return {actor.name: ref for actor, ref in zip(self.actors.values(), calls, strict=True)}

    @property
    def places(self) -> list[Place]:
        return [self.actors[index].place for index in self.present]

    @property
    def present(self) -> list[int]:
        """The engines that are asked, though one may be coming back just now."""
        return [index for index in range(self.config.rollout.engines) if index not in self.absent]

    def start_async(self) -> None:
        actors, timeout_s = list(self.actors.values()), self.config.rollout.start_timeout_s
        self._starting = Starting(actors, self.placement.engines_share, timeout_s)

    def wait_started(self) -> list[dict]:
        assert self._starting is not None
        return self._starting.wait()

    def prepare_refit(self, layouts: list[PartLayout], channel: Channel) -> None:
        actors = list(self.actors.values())
        asked = [actor.remote("prepare_refit", layouts, channel) for actor in actors]
        get(actors, asked, self._refit_timeout)
        self.prepared = layouts, channel

    async def all_back(self) -> None:
        while self.returning:
            index, task = next(iter(self.returning.items()))
            await asyncio.wait([task])
            if self.returning.get(index) is task:  # until now nobody may be sent there
                del self.returning[index]
            if not task.cancelled():  # it has died again, and another task brings it back
                task.result()

    async def _free_engine(self, version: int | None, near: int | None = None) -> int:
        """The engine with the fewest requests of those that serve a version (None: any); `near`,
        when it has at most a fourth more, or one. Raises EngineDied when none does any more, and
        what kept one from coming back."""
        while True:
            for index, task in list(self.returning.items()):
                if task.done():
                    del self.returning[index]
                    task.result()
            gone = self.empty | self.returning.keys()
            alive = [index for index in self.present if index not in gone]
            serving = [i for i in alive if version is None or self.oldest[i] <= version]
            if serving:
                least = min(serving, key=lambda index: self.rolling[index])
                most = self.rolling[least] + max(1, self.rolling[least] // 4)
                return near if near in serving and self.rolling[near] <= most else least
            if self.returning and not alive:
                await asyncio.wait(self.returning.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            if self.given_up is not None and not alive:
                raise self.given_up  # there will be no further version
            await asyncio.sleep(PUBLISH_POLL_S)
            if alive:  # the ticket comes again, with the version that is served by then
                raise EngineDied(f"no engine serves version {version} any more")

    async def _ask(
        self,
        index: int,
        method: str,
        *args: Any,
        num_returns: int = 1,
        ask: Callable[[Actor, Ref], Awaitable[Any]] | None = None,
    ) -> list[Ref]:
        """References to what an engine returns, once it has; an engine that dies or is silent is
        started anew and asked again, and one that others have seen die is asked once it has a
        version again. It is waited for by `ask`; None: as for a request.

        Raises what the engine raises, EngineLost when it dies or is silent more often than is
        allowed, and EngineLeft when it leaves the run over that.
        """
        brings_back = _BRINGS_BACK.get() == index  # who does that counts its deaths too
        while True:
            while not brings_back and self._is_begun(index):
                await self._back(index, proven=False)
            actor = self.actors[index]
            sent = actor.remote(method, *args, num_returns=num_returns)
            refs = sent if num_returns > 1 else [sent]
            try:
                if ask is None:
                    await heard(actor, refs[0], self.pulses[index])
                else:
                    await ask(actor, refs[0])
                return refs
            except LoraMoeRlError as error:
                if not is_death(error) or brings_back:
                    raise
                await self._back(index, proven=self._let_return(index, actor, error))
                if index in self.absent:
                    raise EngineLeft(f"engine {index} has left the run") from error

    def _is_begun(self, index: int) -> bool:
        """Whether an engine is being started anew, and has no version yet."""
        return index in self.returning and not self._taken[index].is_set()

    async def _back(self, index: int, proven: bool) -> None:
        """Returns once an engine that has died is there again, and proven; or, where others have
        begun that, as soon as it has the version: its proof may wait for who waits here. Raises
        what keeps it from coming back."""
        if (task := self.returning.get(index)) is None:
            return
        taken = asyncio.ensure_future(self._taken[index].wait())
        try:
            waits = [task] if proven else [task, taken]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            taken.cancel()
        if not task.done() or task.cancelled():
            return
        task.result()
        if self.returning.get(index) is task:
            del self.returning[index]

    @property
    def _refit_timeout(self) -> float:
        """An engine may wait as long for a slot and again for its workers."""
        return 2 * self.config.refit.timeout_s + REFIT_GRACE_S

    async def _refitted(self, actor: Actor, ref: Ref) -> Any:
        """What an engine answers to a question about versions. Raises EngineSilent when it gives
        none in time; its stacks are in its log then."""
        try:
            return await answer(actor, ref, self._refit_timeout)
        except ActorSilent as error:
            await asyncio.to_thread(stacks.dump, [actor.place])
            raise EngineSilent(error.reason) from error

    async def _give(self, index: int, method: str, version: int, parts: Sequence[Ref]) -> list[Ref]:
        """`_ask` with the parts of a version."""

        async def ask() -> list[Ref]:
            return await self._ask(index, method, version, *parts, ask=self._refitted)

        return await self._with_parts(ask, parts)

    async def _with_parts(self, ask: Callable[[], Awaitable[Any]], parts: Sequence[Ref]) -> Any:
        """What `ask` gives; once more when the parts have become others meanwhile (`renew`)."""
        while True:
            before = list(parts)
            try:
                return await ask()
            except LoraMoeRlError:
                if self.renew is None or not (await self.renew() or list(parts) != before):
                    raise

    async def _each(self, method: str, *args: Any) -> list[Any]:
        """What each engine answers, none of which is started anew over it."""
        actors = [self.actors[index] for index in self.present]
        asked = (self._refitted(actor, actor.remote(method, *args)) for actor in actors)
        return await asyncio.gather(*asked)

    def _let_return(self, index: int, actor: Actor, error: LoraMoeRlError) -> bool:
        """An engine has died over a request. Whether it is started anew for that; others may have
        noticed before. Raises `error` if it is no death, and EngineLost for an engine that others
        have given up."""
        if not is_death(error):
            raise error
        if index in self.absent:
            return False
        if not self._is_first(index, actor):
            if self.given_up is not None and self._stays_dead(index, actor):
                raise self.given_up from error
            return False
        if not self._count(index, error):
            return False
        if (before := self.returning.get(index)) is not None:
            before.cancel()  # it was to be proven, and has died again
        self.returning[index] = asyncio.create_task(self._bring_back(index))
        return True

    def _is_first(self, index: int, actor: Actor) -> bool:
        """Whether nobody has noticed yet that this actor is dead. From now on somebody has."""
        if actor is not self.actors[index] or index in self._noticed:
            return False
        self._noticed.add(index)
        self._taken[index].clear()
        return True

    def _stays_dead(self, index: int, actor: Actor) -> bool:
        """Whether nobody starts anew an engine whose death was noticed."""
        return actor is self.actors[index] and index not in self.returning

    def _leaves(self, index: int, reason: str) -> bool:
        """Whether the run goes on without an engine that has died too often (`joining.py`)."""
        return False

    def _count(self, index: int, error: LoraMoeRlError) -> bool:
        """Counts a death: True when the engine is to be started anew, False when it has left the
        run. Raises `error` when it is no death, EngineLost beyond the bound."""
        if not is_death(error):
            raise error
        actor, rollout = self.actors[index], self.config.rollout
        reason = error.reason if isinstance(error, ActorFailed) else str(error)
        if silent := isinstance(error, EngineSilent):
            what, key, limit = "is silent", "rollout.max_silences", rollout.max_silences
        else:
            what, key, limit = "died", "rollout.max_restarts", rollout.max_restarts
        done = self.silences if silent else self.restarts - self.silences
        if done >= limit:
            if self._leaves(index, reason):
                return False
            reason += (
                f"; {done} restarts so far, and {key}={limit} allows no more. The run can go on "
                "with --resume"
            )
            self.given_up = EngineLost(actor.name, reason, self.run_dir.tail(actor.name))
            raise self.given_up from error
        self.restarts += 1
        self.silences += silent
        log.warning(
            f"%s {what} (%s): starting it anew, restart %d of {key}=%d; its log: %s",
            *(actor.name, reason, done + 1, limit, self.run_dir.log_path(actor.name)),
        )
        return True

    async def _bring_back(self, index: int, begun: Awaitable[None] | None = None) -> None:
        """Starts a dead engine anew, until it lives; `begun`: what starts it already."""
        started = time.perf_counter()
        _BRINGS_BACK.set(index)
        while True:
            try:
                await self._start_anew(index, begun)
                break
            except LoraMoeRlError as error:
                begun = None
                if is_death(error) and not self._is_first(index, self.actors[index]):
                    return  # whoever noticed it starts the engine anew
                if not self._count(index, error):
                    return
        if index in self.absent:
            return
        served = "" if self.published is None else f" and serves version {self.published[0]}"
        log.warning(
            "engine-%d is back%s, %.1f s later", index, served, time.perf_counter() - started
        )

    async def _begin(self, index: int) -> None:
        """Starts an engine that is asked for nothing yet."""
        actor = self.actors[index] = self._actor(index)
        self._noticed.discard(index)
        self.pulses[index] = Pulse(self.config.rollout.silent_s)
        async with self._one_starts if self.placement.engines_share else nullcontext():
            await answer(actor, actor.start(), self.config.rollout.start_timeout_s)
        if self.prepared is not None:
            await self._refitted(actor, actor.remote("prepare_refit", *self.prepared))
        if self.pinned is not None:
            await self._refitted(actor, actor.remote("pin", self.pinned))

    async def _start_anew(self, index: int, begun: Awaitable[None] | None) -> None:
        if begun is None:
            self.actors[index].end()  # may live on around a vLLM that has died, or is silent
            begun = self._begin(index)
        await begun
        actor = self.actors[index]
        if self.published is not None:
            version, parts = self.published
            self.oldest[index] = version

            async def publish() -> None:
                await self._refitted(actor, actor.remote("publish", version, *parts))

            await self._with_parts(publish, parts)
            self._taken[index].set()
            if self.prove is not None:
                await self.prove(index, version)
        else:
            self.empty.add(index)
            self._taken[index].set()


class EngineLeft(EngineDied):
    """An engine was asked, and has left the run."""


def is_death(error: LoraMoeRlError) -> bool:
    return isinstance(error, EngineDied) or isinstance(error.__cause__, RayActorError)
