"""What clients ask samples for, from the engines of a run.

    Ask ── checked ──┬── n samples, each with routes of its own ──> RouteStore
                     └── a scored prompt, if it is asked for     ──> Sampled

An adapter version's samples are kept with their routes, for the data that clients make of them. The
bare base (None) is not trained: its routes are nobody's.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.told import Told, ToldPrompt
from lora_moe_rl.errors import EngineDied, ServiceError
from lora_moe_rl.ports import Manner
from lora_moe_rl.rollout.facts import most_likeliest
from lora_moe_rl.router_replay.travel import SentRoutes
from lora_moe_rl.service.backend import Ask, Facts, Said, Sampled
from lora_moe_rl.service.routes import ORIGIN, Origin, RouteStore

LEAST_TEMPERATURE = 0.01  # below which vLLM would take this one
SEEDS = 2**63


def seed_of(seed: int, number: int) -> int:
    """The seed of a request's samples after the first: of two requests with neighbouring seeds none
    draws what another does."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0]) % SEEDS


class AskedEngines(Protocol):
    """What is asked here of a run's engines (cluster/engines.py)."""

    spec: AdapterSpec

    async def sample_each(
        self,
        token_ids: Sequence[int],
        version: int | None,
        seeds: Sequence[int],
        manner: Manner,
        top: int = 0,
    ) -> list[tuple[Told, SentRoutes]]: ...

    async def score_prompt(
        self, token_ids: Sequence[int], version: int | None, top: int = 0
    ) -> ToldPrompt: ...

    def lost(self, version: int) -> bool: ...


class Samplers:
    """`store` None: nothing is replayed."""

    def __init__(
        self, engines: AskedEngines, config: RunConfig, store: RouteStore | None, facts: Facts
    ):
        self.engines, self.store, self.facts = engines, store, facts
        self.vocab_size = engines.spec.shape.vocab_size
        most = most_likeliest(config.rollout)
        self.most_likeliest = self.vocab_size if most is None else most
        self._seeds = np.random.default_rng(config.seed)

    async def sample(self, version: int | None, ask: Ask, of: Origin = ORIGIN) -> Sampled:
        """By an adapter version, or by the bare base (None). Asked again when its engine dies.
        `of`: whose data get the routes (`RouteStore.put`). The first sample has the request's seed,
        each other one drawn from that and its number. `max_tokens` None is as long as
        model.max_length allows.

        Raises ServiceError for what cannot be asked, NotServed for a version that no engine has in
        a slot any more, and EngineDied when none will ever have it again.
        """
        self.check(ask)
        samples = asyncio.create_task(self._samples(version, ask))
        prompt = asyncio.create_task(self._prompt(version, ask))
        try:
            told, scored = await asyncio.gather(samples, prompt)
        finally:
            samples.cancel()
            prompt.cancel()
        if version is not None and self.store is not None:
            for one, routes in told:
                self.store.put(one.sample.token_ids, routes, one.sample.logprobs, of)
        return Sampled(
            [_said(one) for one, _ in told],
            scored.logprobs if scored is not None and ask.prompt_logprobs else None,
            scored.top if scored is not None else None,
            min(one.cached for one, _ in told),
        )

    async def _samples(self, version: int | None, ask: Ask) -> list[tuple[Told, SentRoutes]]:
        seed = int(self._seeds.integers(SEEDS)) if ask.seed is None else ask.seed
        seeds = [seed, *(seed_of(seed, i) for i in range(1, ask.samples))]
        asked = ask.prompt, version, seeds, self._manner(ask), ask.top_sampled
        return await self._again(version, lambda: self.engines.sample_each(*asked))

    async def _prompt(self, version: int | None, ask: Ask) -> ToldPrompt | None:
        if not ask.prompt_logprobs and not ask.top_prompt:
            return None
        asked = ask.prompt, version, ask.top_prompt
        return await self._again(version, lambda: self.engines.score_prompt(*asked))

    def _manner(self, ask: Ask) -> Manner:
        room = self.facts.room(ask) - len(ask.prompt)
        # At temperature 0 nothing is drawn, and logprobs are those of temperature 1: of all tokens,
        # with whatever else is in vLLM's batch.
        greedy = ask.temperature == 0
        return Manner(
            temperature=ask.temperature,
            top_p=1.0 if greedy else ask.top_p,
            top_k=0 if greedy else max(ask.top_k, 0),
            stop_token_ids=ask.stop_token_ids,
            max_tokens=room if ask.max_tokens is None else ask.max_tokens,
            stop=ask.stop,
        )

    async def _again[Found](
        self, version: int | None, ask: Callable[[], Awaitable[Found]]
    ) -> Found:
        """What is asked, of another engine when one dies, as long as any will serve the version."""
        while True:
            try:
                return await ask()
            except EngineDied:
                if version is not None and self.engines.lost(version):
                    raise

    def check(self, ask: Ask) -> None:
        """Raises ServiceError for what no engine here can be asked."""
        longest = self.facts.room(ask)
        if not 1 <= len(ask.prompt) < longest:
            raise ServiceError(
                f"a prompt of {len(ask.prompt)} tokens leaves no room for a sample: it has from 1 "
                f"to {longest - 1}, since model.max_length={self.facts.max_length}"
            )
        room = longest - len(ask.prompt)
        if ask.max_tokens is not None and ask.max_tokens > room:
            raise ServiceError(
                f"max_tokens={ask.max_tokens} after a prompt of {len(ask.prompt)} tokens is more "
                f"than model.max_length={self.facts.max_length}; ask for {room} at most, or leave "
                "it out"
            )
        for name, ids in (("the prompt", ask.prompt), ("stop", ask.stop_token_ids)):
            wrong = [token for token in ids if not 0 <= token < self.vocab_size]
            if wrong:
                raise ServiceError(
                    f"{name} has the token {wrong[0]}; the model's are 0 to {self.vocab_size - 1}"
                )
        if "" in ask.stop:
            raise ServiceError("stop has an empty text in it, with which every sample would end")
        for name, allowed, what in self._bounds(ask):
            if not allowed:
                raise ServiceError(f"{name}={json.dumps(getattr(ask, name))} is not {what}")

    def _bounds(self, ask: Ask) -> list[tuple[str, bool, str]]:
        """A setting, whether it is what it has to be, and what that is."""
        warm = math.isfinite(ask.temperature) and ask.temperature >= LEAST_TEMPERATURE
        most = self.most_likeliest
        likeliest = f"from 0 to {most}, the tokens that are told of a place"
        return [
            ("samples", ask.samples >= 1, "at least 1"),
            ("max_tokens", ask.max_tokens is None or ask.max_tokens >= 1, "at least 1"),
            ("temperature", ask.temperature == 0 or warm, f"0, or at least {LEAST_TEMPERATURE}"),
            ("top_p", 0 < ask.top_p <= 1, "above 0 and at most 1"),
            ("top_k", ask.top_k >= -1, "a number of tokens, or -1 for all"),
            ("top_prompt", 0 <= ask.top_prompt <= most, likeliest),
            ("top_sampled", 0 <= ask.top_sampled <= most, likeliest),
        ]


def _said(told: Told) -> Said:
    sample = told.sample
    return Said(sample.response_ids, sample.logprobs, sample.finish_reason, told.top)
