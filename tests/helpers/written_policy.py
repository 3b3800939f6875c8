"""A policy without a model: what it samples follows from its seed, and the routes of a token from
the tokens up to it alone, as in a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import Sample, Segment
from lora_moe_rl.router_replay.packed import PackedRoutes
from lora_moe_rl.router_replay.table import RouteTable, token_sum
from lora_moe_rl.router_replay.travel import SentRoutes, fetch, join, send

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
    return bound_table(rows, [token_ids[:-1] for token_ids in sequences])


def bound_table(rows: Sequence[np.ndarray], fed: Sequence[Sequence[int]]) -> RouteTable:
    """Of rows that were recorded of the tokens `fed`."""
    table = RouteTable.build(rows, [len(one) for one in rows], LAYERS, EXPERTS, TOP_K)
    return replace(table, token_sums=np.array([token_sum(one) for one in fed], np.uint64))


def check_bound(samples: Sequence[Sample], sent: SentRoutes) -> None:
    """Every record is of the tokens that are fed of its sample in the record's place."""
    batch = TrainBatch.from_samples(samples, [], [])
    assert sent.sample_offsets.tolist() == batch.offsets.tolist()
    for i, start in enumerate(sent.sample_offsets[:-1].tolist()):
        for record in sent.records(i):
            fed = batch.fed(i)[slice(*sent.offsets[record : record + 2] - start)]
            (block,) = (one for one in sent.blocks if one.first <= record < one.stop)
            for part in fetch(block.parts):
                packed = PackedRoutes.from_bytes(part)
                assert packed.token_sums[record - block.first] == token_sum(fed)


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
        table = bound_table([rows], [whole[turn.recorded : -1]])
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
