"""Requests that each have a manner of their own, and stay at the version that they name: turns of
others beside a run's samples, and what a service's clients ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from lora_moe_rl.data.samples import Sample
from lora_moe_rl.data.told import Told, ToldPrompt
from lora_moe_rl.errors import NotServed
from lora_moe_rl.ports import Manner, Turn
from lora_moe_rl.rollout import outputs
from lora_moe_rl.rollout.in_flight import Piece, Question
from lora_moe_rl.rollout.vllm_engine import VllmEngine
from lora_moe_rl.router_replay.travel import SentRoutes, send, taken_apart

BASE_VERSION = -2  # of the base's tokens: no adapter version, and not NOT_SAMPLED
PACKING_THREADS = 2  # one packs while another hands over; more would take turns with the loop


class AskedEngine(VllmEngine):
    """`sampling`: vLLM's SamplingParams of the run. `leaving`: the version whose slot a newer one
    waits for; no request for it begins here."""

    tokenizer: Any
    sampling: Any

    def __init__(self, *parts: Any):
        super().__init__(*parts)
        self.leaving: int | None = None
        self.packing = ThreadPoolExecutor(PACKING_THREADS, "routes")

    def _lora_request(self, version: int) -> Any:
        """vLLM's name for a version. Raises NotServed for one that is in no slot."""
        raise NotImplementedError

    def _not_served(self, version: int) -> NotServed:
        raise NotImplementedError

    async def say(
        self, token_ids: Sequence[int], version: int | None, turn: Turn, seed: int, manner: Manner
    ) -> Sample:
        """A turn of a conversation under `version`, or by the bare base (None). Its routes are
        nobody's. Raises NotServed for a version that is in no slot, or is about to leave its."""
        self._check_stays(version)
        unrecorded = replace(turn, recorded=len(token_ids) - 1)
        piece, _ = await self._said(token_ids, version, unrecorded, seed, manner)
        shape, recorded = self.spec.shape, unrecorded.recorded
        (sample,), _ = outputs.samples_and_routes([[piece]], self.tokenizer, shape, recorded)
        return sample

    async def sample_each(
        self,
        places: int,
        token_ids: Sequence[int],
        version: int | None,
        seeds: Sequence[int],
        manner: Manner,
        top: int,
    ) -> tuple[Any, ...]:
        """A sample of each seed that goes on from `token_ids`, with the `top` likeliest tokens at
        each of its places. Returns 1 + `places` results of a call: first (Told, routes) of each,
        whose routes stand alone, and then the large parts of all of these in turn, as many places
        for each. Of the base's (None) the prompt has no routes. Raises as `say` does."""
        assert manner.max_tokens is not None
        self._check_stays(version)
        turn = Turn(0, 0, 0 if version is not None else len(token_ids) - 1, manner.max_tokens)
        answers = await asyncio.gather(
            *(self._said(token_ids, version, turn, seed, manner, top) for seed in seeds)
        )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.packing, self._each_packed, places, answers, top)

    def _each_packed(
        self, places: int, answers: Sequence[tuple[Piece, int]], top: int
    ) -> tuple[Any, ...]:
        """Not called in the event loop, as `RolloutEngine._packed`."""
        shape = self.spec.shape
        found: list[tuple[Told, SentRoutes]] = []
        beside: list[Any] = []
        for piece, cached in answers:
            there = [[piece]], self.tokenizer, shape, piece.recorded
            (sample,), table = outputs.samples_and_routes(*there)
            routes = send(table, outputs.route_pieces(shape, self.config.trainer))
            apart, large = taken_apart(routes, places // len(answers))
            likeliest = outputs.likeliest(piece.output.logprobs, top)
            found.append((Told(sample, likeliest, cached), apart))
            beside += large
        return found, *beside

    async def score_prompt(
        self, token_ids: Sequence[int], version: int | None, top: int
    ) -> ToldPrompt:
        """Logprobs of a prompt's tokens, and the `top` likeliest at each place. Raises as `say`
        does."""
        self._check_stays(version)
        answer = await self._request(token_ids, outputs.scoring_params(top), version)
        return outputs.prompt_scores(answer, top)

    def _check_stays(self, version: int | None) -> None:
        if version is not None and version == self.leaving:
            raise self._not_served(version)

    async def _said(
        self,
        token_ids: Sequence[int],
        version: int | None,
        turn: Turn,
        seed: int,
        manner: Manner,
        top: int = 0,
        **more: Any,
    ) -> tuple[Piece, int]:
        """And how many of `token_ids` came from the prefix cache."""
        served = BASE_VERSION if version is None else version
        question = Question(token_ids, 1, seed, turn.max_tokens, served, turn.recorded, manner, top)
        params = outputs.params_of(self.sampling, question)
        answer = await self._request(token_ids, params, version, **more)
        piece = Piece(token_ids, answer.outputs[0], served, turn.recorded)
        return piece, answer.num_cached_tokens
