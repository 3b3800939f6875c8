"""The rollout engines as the run sees them: all replicas as one.

Tickets that an engine was rolling when it died go back to the book, and to whichever engine is
free; all else that it was asked is asked again (`replicas.py`). Samples depend on their seed alone,
and a version is published in full or not at all, so that nothing depends on who answers. The other
engines go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import ray
from ray.exceptions import RayError

from lora_moe_rl.cluster.actors import Actor, answer
from lora_moe_rl.cluster.hearing import heard
from lora_moe_rl.cluster.replicas import is_death
from lora_moe_rl.cluster.taking_turns import TakingTurns
from lora_moe_rl.cluster.ticket_policy import TicketPolicy
from lora_moe_rl.cluster.turns import Act
from lora_moe_rl.data.samples import Sample
from lora_moe_rl.data.told import Told, ToldPrompt
from lora_moe_rl.errors import EngineDied, LoraMoeRlError, NotServed
from lora_moe_rl.ports import Manner, Receipt, Ref, Scored, Turn, Watch, Written
from lora_moe_rl.router_replay import travel


class RolloutEngines(TakingTurns):
    """What a run asks of its engines."""

    def policy(
        self,
        version: int,
        seed: int,
        watch: Watch = nullcontext,
        manner: Manner | None = None,
    ) -> TicketPolicy:
        return TicketPolicy(self, version, seed, watch, manner)

    async def pin(self, version: int | None) -> None:
        self.pinned = version  # which those that come back are told too
        await asyncio.gather(*(self._pin(self.actors[index]) for index in self.present))

    async def _pin(self, actor: Actor) -> None:
        """Tells one engine. That it has died, or is silent, is for those to find who wait for its
        answers."""
        try:
            await self._refitted(actor, actor.remote("pin", self.pinned))
        except LoraMoeRlError as error:
            if not is_death(error):
                raise

    def lost(self, version: int) -> bool:
        if self.published is not None and self.published[0] == version:
            return False  # whoever comes back takes it
        gone = self.empty | self.returning.keys()
        return all(index in gone or self.oldest[index] > version for index in self.present)

    async def sample(
        self,
        token_ids: Sequence[int],
        n: int,
        version: int,
        seed: int,
        watch: Watch,
        turn: Turn | None,
        manner: Manner | None,
        places: dict[int, int],
    ) -> tuple[list[Sample], Ref]:
        """Asks the engine that has least to do, and for a further turn that which has the
        conversation so far in its cache, unless that has clearly more: `places` are those of the
        ticket's conversations. It gives the request up when nobody waits for it any more. Raises
        EngineDied when it dies over it; it comes back by itself, and its death is counted once,
        however many were waiting for it."""
        if manner is None:
            version = max(version, self.newest)
        index = await self._free_engine(version, places.get(turn.conversation) if turn else None)
        if turn is not None:
            places[turn.conversation] = index
        with self._rolls(index) as actor, watch(index):
            asked = token_ids, n, version, seed, turn, manner
            places = n * self.route_pieces
            refs = actor.remote("sample_in_parts", places, *asked, num_returns=1 + places)
            with _given_up_together(refs[0]):
                samples, routes = await heard(actor, refs[0], self.pulses[index])
            return samples, travel.put_together(routes, refs[1:])

    async def say(
        self,
        token_ids: Sequence[int],
        version: int | None,
        turn: Turn,
        seed: int,
        manner: Manner,
        watch: Watch,
    ) -> Sample:
        """One turn that is no sample of the run, under `version` or by the bare base (None): as
        `sample` does it. Raises NotServed for a version that no engine has any more."""
        self._check_served(version)
        index = await self._free_engine(version)
        with self._rolls(index) as actor, watch(index):
            sent = actor.remote("say", token_ids, version, turn, seed, manner)
            with _given_up_together(sent):
                return await heard(actor, sent, self.pulses[index])

    async def sample_each(
        self,
        token_ids: Sequence[int],
        version: int | None,
        seeds: Sequence[int],
        manner: Manner,
        top: int = 0,
    ) -> list[tuple[Told, travel.SentRoutes]]:
        """A sample of each seed, all by one engine, whose cache has the prompt once: under
        `version` to its end, or by the bare base (None). With each the `top` likeliest tokens at
        its places, and its routes, which stand alone; a sample has at most `manner.max_tokens`
        tokens. Raises NotServed for a version that no engine has any more, and EngineDied as
        `sample` does."""
        self._check_served(version)
        index = await self._free_engine(version)
        with self._rolls(index, len(seeds)) as actor:
            each = self.route_pieces
            places = each * len(seeds)
            asked = places, token_ids, version, seeds, manner, top
            refs = actor.remote("sample_each", *asked, num_returns=1 + places)
            with _given_up_together(refs[0]):
                found = await heard(actor, refs[0], self.pulses[index])
            large = [refs[1 + i * each : 1 + (i + 1) * each] for i in range(len(seeds))]
            return [
                (told, travel.put_together(routes, own))
                for (told, routes), own in zip(found, large, strict=True)
            ]

    async def score_prompt(
        self,
        token_ids: Sequence[int],
        version: int | None,
        top: int = 0,
        watch: Watch = nullcontext,
    ) -> ToldPrompt:
        """Logprobs of a prompt's tokens at temperature 1, and the `top` likeliest at each place, by
        the engine that has least to do. Raises as `sample_each` does."""
        self._check_served(version)
        index = await self._free_engine(version)
        with self._rolls(index) as actor, watch(index):
            sent = actor.remote("score_prompt", token_ids, version, top)
            with _given_up_together(sent):
                return await heard(actor, sent, self.pulses[index])

    def _check_served(self, version: int | None) -> None:
        oldest = [self.oldest[index] for index in self.present]
        if version is not None and all(one > version for one in oldest):
            there = () if self.published is None else (self.published[0],)
            raise NotServed(f"no engine serves adapter version {version} any more", there)

    @contextmanager
    def _rolls(self, index: int, samples: int = 1) -> Iterator[Actor]:
        """Around one request, of as much work as so many. Raises EngineDied when the engine dies
        over it."""
        actor = self.actors[index]
        self.rolling[index] += samples
        try:
            yield actor
        except LoraMoeRlError as error:
            self._let_return(index, actor, error)
            raise EngineDied(str(error)) from error
        finally:
            self.rolling[index] -= samples

    async def write(
        self, token_ids: list[int], max_tokens: int, temperature: float, seed: int
    ) -> Written:
        """Writes text by the bare base, on the engine that has least to do. Raises what the engine
        raises, and ActorFailed when it dies over it: it is started anew when it is asked for
        samples."""
        await self.requests_begin.wait()
        self.take(Act.SAMPLE)
        alive = [index for index in self.present if index not in self.returning]
        index = min(alive or self.present, key=lambda i: self.rolling[i])
        actor = self.actors[index]
        self.rolling[index] += 1
        try:
            sent = actor.remote("write", token_ids, max_tokens, temperature, seed)
            with _given_up_together(sent):
                return Written(*await answer(actor, sent))
        finally:
            self.rolling[index] -= 1

    async def score(
        self,
        sequences: Sequence[Sequence[int]],
        version: int | None,
        engines: Sequence[int] | None = None,
    ) -> list[Scored]:
        """Routes stay where they are; what says whether they are equal comes along."""
        self.take(Act.SCORE)
        refs = await self._all(
            lambda i: self._ask(i, "probe", sequences, version, num_returns=2), engines
        )
        found = ray.get([scores for scores, _ in refs.values()])
        return [
            Scored(index, logprobs, table, checksum, complete)
            for (index, (_, table)), (logprobs, checksum, complete) in zip(
                refs.items(), found, strict=True
            )
        ]

    async def publish(self, version: int, parts: Sequence[Ref]) -> list[Receipt]:
        """Every engine takes the version, or the run stops. The parts stay as they are until the
        next version: engines that come back take it from them too."""
        await self.all_back()
        await self.slots_back()
        self.published = None
        for index in self.arrivals():
            await self._pin(self.actors[index])

        def give(index: int) -> Awaitable[list[Ref]]:
            return self._give(index, "publish", version, parts)

        with self.held_up:  # one of merged weights answers nothing meanwhile
            refs = await self._all(give)
            await self.all_back()
            # Those that stand in for others, which have left over it.
            refs |= await self._all(give, self.empty - refs.keys())
        self.published = version, parts
        for index in self.empty:
            self.oldest[index] = version
        self.empty.clear()
        return ray.get([ref for (ref,) in refs.values()])

    async def keep(self, version: int, parts: Sequence[Ref]) -> list[int]:
        """From here on whoever comes back takes it, as after `publish`."""
        await self.all_back()
        new = [index for index in self.present if index in self.empty]
        if new:
            await self.slots_back()
            await self._all(lambda i: self._give(i, "publish", version, parts), new)
            for index in new:
                self.oldest[index] = version
            self.empty.clear()
        self.published = version, parts
        return new

    async def move_on(self, version: int) -> None:
        """An engine that dies, or is coming back, has none in flight."""
        self.newest = version
        there = [index for index in self.present if index not in self.returning]
        await asyncio.gather(*(self._moved_on(index, version) for index in there))

    async def _moved_on(self, index: int, version: int) -> None:
        actor = self.actors[index]
        try:
            await self._refitted(actor, actor.remote("move_on", version))
        except LoraMoeRlError as error:
            self._let_return(index, actor, error)

    def overwrite(self) -> None:
        self.published = None

    async def differing(
        self, version: int, parts: Sequence[Ref], engines: Sequence[int] | None = None
    ) -> list[str]:
        refs = await self._all(lambda i: self._give(i, "differing", version, parts), engines)
        return sorted(
            {name for names in ray.get([ref for (ref,) in refs.values()]) for name in names}
        )

    async def roll_back(self, version: int, parts: Sequence[Ref]) -> list[str]:
        found = await self._each("differing", version, *parts)
        await self._each("drop", version)
        return sorted({name for names in found for name in names})


@contextmanager
def _given_up_together(ref: Ref) -> Iterator[None]:
    """Around waiting for what an engine is asked: when that is cancelled, so is the engine's
    coroutine, which would go on by itself, and with it the request to vLLM."""
    try:
        yield
    except asyncio.CancelledError:
        with suppress(RayError):  # at the end of a run Ray may be gone already
            ray.cancel(ref)
        raise
