"""The service's backend: trainer ranks and rollout engines, by their models and samplers.

    create, forward, step      of the ranks, one call at a time: they hold one model at a time
    publish                    a copy of the model waits on the ranks' hosts as the sampler's, and
                               engines take it as a version of their own (run/publisher.py proves
                               that they serve it)
    sample                     by the version of the sampler; one that has lost its slot to newer
                               ones is published again

Routes of what engines sampled are kept (`routes.py`), and replayed where a datum has the tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from lora_moe_rl.cluster.engines import RolloutEngines
from lora_moe_rl.cluster.service_ranks import ServiceRanks
from lora_moe_rl.errors import EngineDied, EngineLost, NotServed, RefitError, ServiceError
from lora_moe_rl.run.publisher import Publisher
from lora_moe_rl.service import saved
from lora_moe_rl.service.backend import (
    Adam,
    Ask,
    Datum,
    Facts,
    Lora,
    LossCall,
    Passed,
    Sampled,
)
from lora_moe_rl.service.batches import batch_of, check_data, logprobs_of
from lora_moe_rl.service.loras import Places
from lora_moe_rl.service.routes import ORIGIN, Origin, RouteStore
from lora_moe_rl.service.sampling import Samplers
from lora_moe_rl.service.slots import Slots
from lora_moe_rl.service.turn import Turn
from lora_moe_rl.service.waiting import KEPT, Waiting

FIRST, FIRST_SAMPLER = "first", "first sampler"
AGAIN = 5  # times that one sample is asked for, when newer versions take its slot each time


class EngineRoom:
    """`start` comes first. All calls in one event loop."""

    def __init__(
        self,
        facts: Facts,
        places: Places,
        base: dict,
        ranks: ServiceRanks,
        engines: RolloutEngines,
        publisher: Publisher,
        samplers: Samplers,
        store: RouteStore | None,
    ):
        """`base`: what a checkpoint says of the base. `store` None: nothing is replayed."""
        self.facts, self.places, self.base = facts, places, base
        self.ranks, self.engines, self.publisher = ranks, engines, publisher
        self.samplers, self.store = samplers, store
        self.loras: dict[str, Lora] = {}  # of models
        self.waiting = Waiting()
        self.slots = Slots(places.config.refit.slots)
        self.origins: dict[str, Origin] = {}  # of samplers
        self.saved: dict[tuple[int, str], Origin] = {}  # of checkpoints, by model and digest
        self.states: dict[str, int] = {}  # of models, the numbers of their weights
        self.digests: dict[str, str] = {}  # of samplers that were read, of their checkpoints
        self.numbers: dict[str, int] = {}  # of models
        self.version = self.batches = self.state = 0
        self.newest = FIRST  # the sampler that was published last
        self.turn = Turn(engines, self._come_back)
        self._again: set[asyncio.Task[int]] = set()
        self._one_publishes = asyncio.Lock()

    async def start(self) -> None:
        """Serves a model that nobody asks for: what engines serve is proven against versions."""
        self.engines.prove = self._prove_returned
        await self.create(FIRST, Lora(self.facts.rank, self.places.config.seed))
        async with self.turn.alone():
            await self.ranks.keep(FIRST, FIRST_SAMPLER)
            await self.publisher.start()

    def check(self, lora: Lora) -> None:
        self.places.check(lora)

    async def create(self, model: str, lora: Lora) -> None:
        self.check(lora)
        ranks, factor = self.places.ranks(lora), self.places.factor(lora)
        async with self.turn.alone():
            await self.ranks.create(model, lora.seed, ranks, factor)
            self.loras[model] = lora
            self._changed(model)

    async def forward(
        self, model: str, data: Sequence[Datum], loss: LossCall, backward: bool
    ) -> Passed:
        self._lora(model)
        check_data(data, loss, self.facts, self.places.spec.shape.vocab_size)
        routes, covered = self._routes(model, data)
        async with self.turn.computing():
            self._lora(model)
            self.batches += 1
            batch = batch_of(data, loss, self.batches)
            asked = model, loss.name, loss.settings, backward, batch, routes
            logprobs, metrics = await self.ranks.forward(*asked)
        names = {"loss": "loss:sum", "kl": "sampled_kl:mean", "apart": "sampled_logprob_diff:max"}
        found = {name: metrics[key] for key, name in names.items() if key in metrics}
        if self.store is not None:
            found["replay_coverage:mean"] = covered
        return Passed(logprobs_of(data, logprobs), found)

    async def forget_gradient(self, model: str) -> None:
        self._lora(model)
        async with self.turn.alone():
            await self.ranks.forget_gradient(model)

    async def step(self, model: str, adam: Adam) -> dict[str, float]:
        self._lora(model)
        how = adam.lr, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.clip
        async with self.turn.alone():
            self._changed(model)
            return await self.ranks.step(model, *how)

    async def save(self, model: str, directory: Path) -> None:
        lora = self._lora(model)
        async with self.turn.alone():
            await self.ranks.select(model)
            parts = self.ranks, self.places, self.base
            path = await asyncio.to_thread(saved.write, directory, lora, *parts)
            self.saved[self._number(model), saved.digest_of(path)] = self._origin(model)

    async def load(self, model: str, directory: Path, optimizer: bool) -> Lora:
        read = await asyncio.to_thread(saved.read, directory, self.places, self.base)
        async with self.turn.alone():
            asked = read.path, read.meta, model, self.places.factor(read.lora), optimizer
            self._changed(model)
            await asyncio.to_thread(self.ranks.load, *asked)
            self.loras[model] = read.lora
        return read.lora

    async def export(self, model: str, directory: Path) -> None:
        lora = self._lora(model)
        async with self.turn.alone():
            await self.ranks.select(model)
            parts = self.ranks, self.places, self.base
            await asyncio.to_thread(saved.export, directory, lora, *parts)

    async def publish(self, model: str, sampler: str) -> None:
        self._lora(model)
        async with self._one_publishes, self._next_slot():
            await self.ranks.keep(model, sampler)
            await self._note(sampler, None)
            self.origins[sampler] = self._origin(model)
            await self._serve(model, sampler)

    async def publish_saved(self, directory: Path, model: str, sampler: str) -> None:
        read = await asyncio.to_thread(saved.read, directory, self.places, self.base)
        self.waiting.directories[sampler] = directory
        number = self._number(model)
        unknown = Origin(number, -1)  # of a service that ran before
        self.origins[sampler] = self.saved.get((number, read.digest), unknown)
        async with self._one_publishes, self._next_slot():
            await self._serve_again(sampler)

    async def sample(self, sampler: str | None, ask: Ask) -> Sampled:
        self.samplers.check(ask)
        with self.turn.asking():
            return await self._asked(sampler, ask)

    async def _asked(self, sampler: str | None, ask: Ask) -> Sampled:
        if sampler is None:
            return await self._sampled(None, ask)
        for _ in range(AGAIN):
            version = await self._version_of(sampler)
            with suppress(NotServed, EngineDied), self.slots.reading(version):
                return await self._sampled(version, ask, self.origins[sampler])
            if self.slots.served.get(sampler) == version:
                del self.slots.served[sampler]
        raise ServiceError(
            f"newer versions have taken the slot of this sampler {AGAIN} times over: raise "
            "refit.slots where the service is started, or ask fewer samplers at a time"
        )

    async def _sampled(self, version: int | None, ask: Ask, of: Origin = ORIGIN) -> Sampled:
        try:
            return await self.samplers.sample(version, ask, of)
        except EngineLost as error:
            self.turn.on_death(error)
            raise

    async def forget(self, model: str) -> None:
        if self.loras.pop(model, None) is not None:
            async with self.turn.alone():
                await self.ranks.forget(model)

    async def forget_sampler(self, sampler: str) -> None:
        """Its version keeps its slot until a newer one takes it."""
        self.waiting.directories.pop(sampler, None)
        self.slots.served.pop(sampler, None)
        self.origins.pop(sampler, None)
        self.digests.pop(sampler, None)
        # Engines that come back are proven against the newest, whoever still asks for it.
        if sampler in self.waiting and sampler != self.newest:
            self.waiting.order.remove(sampler)
            async with self.turn.alone():
                await self.ranks.forget(sampler)

    async def _prove_returned(self, index: int, version: int) -> None:
        """An engine that was started anew has taken the newest version. One that died over the
        proof of a version is proven by who publishes that."""
        try:
            if self.turn.is_mine:
                return await self.publisher.prove_returned(index, version)
            async with self.turn.alone():
                await self.ranks.select(self.newest)
                await self.publisher.prove_returned(index, version)
        except RefitError as error:
            self.engines.empty.add(index)  # nobody is to ask it
            self.turn.on_death(error)
            raise

    def _lora(self, model: str) -> Lora:
        if model not in self.loras:
            raise ServiceError(f"there is no model {model} here, or not any more")
        return self.loras[model]

    def _number(self, model: str) -> int:
        """Which keeps the routes of one model's samples apart from another's."""
        return self.numbers.setdefault(model, len(self.numbers))

    def _changed(self, model: str) -> None:
        """Its weights become others: what was sampled before is of another state."""
        self.state += 1
        self.states[model] = self.state

    def _origin(self, model: str) -> Origin:
        return Origin(self._number(model), self.states[model])

    def _routes(self, model: str, data: Sequence[Datum]) -> tuple[list, float]:
        """Routes of each datum, and the share of their tokens whose routes were recorded."""
        if self.store is None:
            return [], 0.0
        own, store = self._origin(model), self.store
        found = [store.find(one.tokens, one.inputs.get("logprobs"), own) for one in data]
        tokens = sum(len(one.tokens) for one in data)
        return [one.routes for one in found], sum(one.recorded for one in found) / tokens

    @asynccontextmanager
    async def _next_slot(self) -> AsyncIterator[None]:
        """Gives the ranks once there is a slot for the next version: others train meanwhile."""
        await self.slots.free(self.version + 1)
        async with self.turn.refitting():
            yield

    async def _version_of(self, sampler: str) -> int:
        """The version that engines serve it as; it is published again where none is."""
        if sampler in self.slots.served:
            return self.slots.served[sampler]
        # Who waits for it may give that up: what ranks and engines do is not left half done.
        task = asyncio.create_task(self._publish_again(sampler))
        self._again.add(task)
        task.add_done_callback(self._again.discard)
        return await asyncio.shield(task)

    async def _publish_again(self, sampler: str) -> int:
        async with self._one_publishes:
            if sampler not in self.slots.served:
                async with self._next_slot():
                    await self._serve_again(sampler)
            return self.slots.served[sampler]

    async def _serve_again(self, sampler: str) -> None:
        if sampler in self.waiting:
            self.waiting.again(sampler)
            return await self._serve(sampler, sampler)
        directory = self.waiting.directories.get(sampler)
        if directory is None:
            raise ServiceError(
                f"the weights of sampler {sampler} are no longer here: {KEPT} newer ones took "
                "their place; save what is to last by a name (save_weights_for_sampler)"
            )
        read = await asyncio.to_thread(saved.read, directory, self.places, self.base)
        if self.digests.setdefault(sampler, read.digest) != read.digest:
            raise ServiceError(
                f"{directory.name} was written over since sampler {sampler} was made of it"
            )
        asked = read.path, read.meta, sampler, self.places.factor(read.lora), False
        await asyncio.to_thread(self.ranks.load, *asked)
        await self._note(sampler, directory)
        await self._serve(sampler, sampler)

    async def _note(self, sampler: str, directory: Path | None) -> None:
        self.waiting.add(sampler, directory)
        while (gone := self.waiting.goes(self.newest)) is not None:
            await self.ranks.forget(gone)

    async def _serve(self, model: str, sampler: str) -> None:
        """What is kept as the sampler, and `model` is, is served."""
        await self.ranks.select(model)
        while self.engines.returning:
            await self.turn.wait_for_engines()
            await self.ranks.select(sampler)  # others may have had the ranks
        self.version += 1
        self.engines.overwrite()
        parts = await self.ranks.send_as(self.version)
        try:
            await self.publisher.publish(self.version, parts, ())
        except RefitError as error:
            if self.places.config.placement.colocated:  # engines are in the middle of a turn
                self.turn.on_death(error)
            raise
        self.slots.served[sampler], self.newest = self.version, sampler

    async def _come_back(self) -> None:
        """Engines go on with what they serve; one that has died meanwhile takes the newest."""
        await self.ranks.select(self.newest)
        await self.publisher.publish(self.version, self.publisher.parts, ())
