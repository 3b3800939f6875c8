"""A policy without a model: what it samples follows from its seed, and the routes of a token from
the tokens up to it alone, as in a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_rl.data.samples import Sample, Segment
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import join, send

LAYERS, EXPERTS, TOP_K, END = (1, 3, 4), 8, 2, 9


def routes_of(token_ids: Sequence[int]) -> np.ndarray:
    """uint8 `[L - 1, layers, top_k]`: what one uninterrupted request records."""
    rows = []
    for stop in range(1, len(token_ids)):
        draw = np.random.default_rng([*token_ids[:stop], 77])
        rows.append([draw.permutation(EXPERTS)[:TOP_K] for _ in LAYERS])
    return np.array(rows, np.uint8).reshape(-1, len(LAYERS), TOP_K)


def table_of(sequences: Sequence[Sequence[int]]) -> RouteTable:
    rows = [routes_of(token_ids) for token_ids in sequences]
    return RouteTable.build(rows, [len(one) for one in rows], LAYERS, EXPERTS, TOP_K)


def logprob_of(token_ids: Sequence[int], place: int) -> float:
    """Of the token at `place`, which follows from those before it."""
    return -float(np.random.default_rng([*token_ids[: place + 1]]).random())


class WrittenPolicy:
    """`turns`: what it says in each turn, as token ids; without any, up to max_tokens ids below 9
    and END at times. Keeps what it was asked."""

    version = 4

    def __init__(self, turns: Sequence[Sequence[int]] = ()):
        self.turns, self.asked = list(turns), []

    async def sample(self, token_ids, n, turn=None):
        assert n == 1 and turn is not None
        self.asked.append((list(token_ids), turn))
        said = self.turns[turn.number][: turn.max_tokens] if self.turns else self._draw(turn)
        whole = [*token_ids, *said]
        logprobs = [logprob_of(whole, len(token_ids) + i) for i in range(len(said))]
        given = Segment.given("user", token_ids)
        segment = Segment.sampled(said, np.array(logprobs), self.version)
        reason = "stop" if said[-1] == END else "length"
        text = "".join(chr(48 + token) for token in said if token != END)
        rows = routes_of(whole)[turn.recorded :]
        table = RouteTable.build([rows], [len(rows)], LAYERS, EXPERTS, TOP_K)
        return [Sample((given, segment), reason, text)], send(table, [(1,), (3, 4)])

    def join(self, samples):
        return join(samples)

    def held_up(self):
        return 0.0

    def _draw(self, turn) -> list[int]:
        draw = np.random.default_rng([turn.conversation, turn.number])
        length = int(draw.integers(1, turn.max_tokens + 1))
        said = draw.integers(1, 9, length).tolist()
        return [*said[:-1], END] if draw.random() < 0.8 else said
