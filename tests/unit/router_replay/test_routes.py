"""A rank's routes: each sample's own, whatever engine and block they came in."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from lora_moe_rl.errors import ReplayError
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import send

pytestmark = pytest.mark.seconds  # imports Megatron
LAYERS, EXPERTS, TOP_K = (1, 2), 6, 2
LENGTHS = [[4], [2, 3, 1], [], [5, 2]]  # rows of each sample, by engine


def table_of(lengths: list[int], seed: int) -> RouteTable:
    draw = np.random.default_rng(seed)
    keys = draw.random((sum(lengths), len(LAYERS), EXPERTS))
    ids = np.split(np.argsort(keys, axis=-1)[..., :TOP_K], np.cumsum(lengths)[:-1])
    rows = [one[:-1] if len(one) == 3 else one for one in ids[: len(lengths)]]  # one is missing
    return RouteTable.build(rows, lengths, LAYERS, EXPERTS, TOP_K)


@pytest.fixture
def received():
    """Routes in blocks of a single sample each, all fetched; and the tables that they were."""
    from lora_moe_rl.router_replay.routes import Routes

    tables = [table_of(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    routes = Routes([send(table, block_bytes=1) for table in tables], [LAYERS])
    routes.fetch(range(routes.num_samples))
    return routes, tables


def test_a_sample_gets_the_routes_that_its_engine_recorded_for_it(received):
    from lora_moe_rl.kernels.route_codec import unpack_array
    from lora_moe_rl.router_replay.packed import valid_rows

    routes, tables = received
    number = 0
    for table in tables:
        for rows in (slice(*table.offsets[i : i + 2]) for i in range(table.num_samples)):
            packed, here = routes.received(0, number)
            known = valid_rows(packed.valid, len(packed.rows), len(LAYERS))[here]
            np.testing.assert_array_equal(known, table.valid[rows])
            found = unpack_array(packed.rows[here], packed.layout)
            np.testing.assert_array_equal(found[known], table.ids[rows][known])
            number += 1
    assert number == routes.num_samples == 6
    with pytest.raises(ReplayError, match="6 samples only"):
        routes.fetch([6])


def test_tokens_without_routes_and_padding_are_not_complete(received):
    routes, _ = received
    assert routes.incomplete.tolist() == [8]  # the third row of the second engine's second sample
    rows = np.array([7, 8, 9, 0, 16, -1])
    found = routes.complete(SimpleNamespace(rows=rows))
    assert found.tolist() == [True, False, True, True, True, False]
    routes.incomplete = np.zeros(0, np.int64)
    assert routes.complete(SimpleNamespace(rows=rows)).tolist() == [True] * 5 + [False]
