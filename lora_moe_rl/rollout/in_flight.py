"""Requests for samples that are in flight while a newer adapter version is published.

By default each ends on the version it began with. With schedule.in_flight=continue they are ended
with what they have, and go on under the newest version from all their tokens so far:

    version 1   p0  p1 │ r0  r1  r2                  a piece: what one request sampled
    version 2   p0  p1   r0  r1  r2 │ r3  r4=end     its prompt is computed anew: no key or value
                                                     of version 1 is seen by version 2

The first request's budget of tokens is that of the whole sample. The seed of a piece follows from
the sample's and from how many tokens it goes on after; one that has none yet is merely asked for
later. Nothing here knows vLLM beyond the fields of its answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lora_moe_rl.ports import Manner, Turn


@dataclass(frozen=True)
class Piece:
    """What one request gave of a sample: `output`, vLLM's, goes on after the tokens `before`;
    `version` sampled it. Routes are there of the tokens that were fed, but for the first
    `recorded` of them."""

    before: Sequence[int]
    output: Any
    version: int
    recorded: int

    @property
    def token_ids(self) -> list[int]:
        return [*self.before, *self.output.token_ids]


@dataclass(frozen=True)
class Question:
    """One request: `n` samples of up to `max_tokens` tokens that go on from `token_ids` under
    `version`, without the routes of the first `recorded` tokens. `manner` None is that of
    training. `top`: of how many of the likeliest tokens logprobs are told beside the sampled
    one's."""

    token_ids: Sequence[int]
    n: int
    seed: int
    max_tokens: int
    version: int
    recorded: int = 0
    manner: Manner | None = None
    top: int = 0

    @property
    def stays(self) -> bool:
        """Whether it ends on the version it began with, whatever is published: an evaluation's."""
        return self.manner is not None


Ask = Callable[[Question], Awaitable[Any]]


class InFlight:
    """Of one engine. `split`: each piece records all its routes, those of the tokens before it
    too. `newest`: the version under which requests go on, -1 while each ends on its own."""

    def __init__(self, split: bool):
        self.split, self.newest = split, -1
        self._versions: dict[str, int] = {}  # of requests in flight, by their names

    @contextmanager
    def noted(self, name: str, version: int) -> Iterator[None]:
        """Around a request that may be ended early."""
        self._versions[name] = version
        try:
            yield
        finally:
            del self._versions[name]

    def older(self) -> list[str]:
        """Names of the requests that have to end, since there is a newer version."""
        return [name for name, version in self._versions.items() if version < self.newest]

    async def samples(
        self, ask: Ask, question: Question, turn: Turn | None = None
    ) -> list[list[Piece]]:
        """The pieces of each of a question's samples, which may go on under newer versions than
        its own unless it stays. Sample i has the question's seed + i."""
        there = (0, None) if turn is None else (turn.recorded, turn.recorded_by)
        version = question.version if question.stays else max(question.version, self.newest)
        recorded = self._not_again(*there, version)
        answer = await ask(replace(question, version=version, recorded=recorded))
        first = [Piece(question.token_ids, one, version, recorded) for one in answer.outputs]
        seed, limit = question.seed, question.max_tokens
        return await asyncio.gather(
            *(self._to_its_end(ask, one, seed + i, limit, *there) for i, one in enumerate(first))
        )

    async def _to_its_end(
        self, ask: Ask, piece: Piece, seed: int, limit: int, rows: int, by: int | None
    ) -> list[Piece]:
        """All pieces of a sample, from the first on. One without a token is left out, unless it is
        the only one. The routes of its first `rows` tokens were there, recorded under version
        `by`."""
        prompt, pieces = len(piece.before), []
        while True:
            token_ids = piece.token_ids
            if piece.output.token_ids:
                pieces.append(piece)
                rows, by = len(token_ids) - 1, piece.version
            if piece.output.finish_reason != "abort" or piece.version >= self.newest:
                return pieces or [piece]
            sampled, version = len(token_ids) - prompt, self.newest
            recorded = self._not_again(rows, by, version)
            left = limit - sampled
            question = Question(token_ids, 1, seed_after(seed, sampled), left, version, recorded)
            answer = await ask(question)
            piece = Piece(token_ids, answer.outputs[0], version, recorded)

    def _not_again(self, rows: int, by: int | None, version: int) -> int:
        """Of the routes that are there, how many `version` need not record."""
        return 0 if self.split and by != version else rows


def seed_after(seed: int, num_tokens: int) -> int:
    """The seed of what goes on after the first tokens of a sample with `seed`."""
    if not num_tokens:
        return seed
    return int(np.random.SeedSequence((seed, num_tokens)).generate_state(1)[0])
