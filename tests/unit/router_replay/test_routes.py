"""A rank's routes: each sample's own, whatever engine, block and requests they came in."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import written_policy

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import pack
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.kernels.route_codec import naive
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import join, send

pytestmark = pytest.mark.seconds  # imports Megatron
LAYERS, EXPERTS, TOP_K = (1, 2), 6, 2
LENGTHS = [[4], [2, 3, 1], [], [5, 2]]  # rows of each sample, by engine
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7, 8], [2, 2, 9], [5, 1, 5, 1, 5, 1]]
CUTS = [[3, 4], [], [2]]
PIECES = [(1,), (3, 4)]


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
            ((packed, here),) = routes.received(0, number)
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
    data = SimpleNamespace(rows=rows, counted=rows >= 0)
    found = routes.complete(data)
    assert found.tolist() == [True, False, True, True, True, False]
    routes.incomplete = np.zeros(0, np.int64)
    assert routes.complete(data).tolist() == [True] * 5 + [False]


@pytest.fixture
def one_rank(monkeypatch):
    from lora_moe_rl.router_replay import routes

    for cut in ("tensor_model", "context"):
        monkeypatch.setattr(routes.ps, f"get_{cut}_parallel_world_size", lambda: 1)
        monkeypatch.setattr(routes.ps, f"get_{cut}_parallel_rank", lambda: 0)
    return routes


def cut_into_turns(holes: bool = False):
    """The same routes as of `table_of`, but sent turn by turn; with a hole in a second turn."""
    samples = []
    for sequence, cuts in zip(SEQUENCES, CUTS, strict=True):
        whole, turns = written_policy.table_of([sequence]), []
        for start, stop in zip([0, *cuts], [*cuts, len(sequence) - 1], strict=True):
            rows = whole.ids[start:stop]
            table = written_policy.bound_table([rows], [sequence[start:stop]])
            if holes and start == 2:
                table.valid[1, 2] = False
            turns.append(send(table, PIECES))
        samples.append(turns)
    return join(samples)


def test_a_micro_batch_has_the_same_rows_however_its_samples_were_cut(one_rank):
    batch = TrainBatch.from_sequences(SEQUENCES)
    data = pack(batch, [2, 0, 1], multiple=4)
    whole = one_rank.Routes([send(written_policy.table_of(SEQUENCES), PIECES)], PIECES)
    turned = one_rank.Routes([cut_into_turns()], PIECES)
    for found in (whole, turned):
        found.check_samples(batch.lengths())
        found.check_missing("error")
        found.fetch([0, 1, 2], batch.fed)
    for one, other in zip(whole.micro(data), turned.micro(data), strict=True):
        np.testing.assert_array_equal(one.rows(), other.rows())
        assert other.rows().any() and other.valid is None


def test_padding_goes_to_all_experts_equally_often(one_rank):
    batch = TrainBatch.from_sequences(SEQUENCES)
    data = pack(batch, [1], multiple=5)  # two tokens are fed of it
    routes = one_rank.Routes([send(written_policy.table_of(SEQUENCES), PIECES)], PIECES)
    routes.fetch([1])
    for layers, micro in zip(PIECES, routes.micro(data), strict=True):
        assert micro.known.tolist() == [True, True, False, False, False]
        ids = naive.unpack(micro.rows(), micro.layout)[2:]
        for column in range(len(layers)):
            used = np.bincount(ids[:, column].ravel(), minlength=written_policy.EXPERTS)
            assert used.max() - used.min() <= 1
            assert all(len(set(row)) == len(row) for row in ids[:, column].tolist())


def test_a_token_of_a_later_turn_without_routes_is_named(one_rank):
    batch = TrainBatch.from_sequences(SEQUENCES)
    found = one_rank.Routes([cut_into_turns(holes=True)], PIECES)
    with pytest.raises(ReplayError, match=r"sample 2 has no routes for token 3, layer 4"):
        found.check_missing("error")
    found.fetch([2])
    data = pack(batch, [2], multiple=1)
    assert found.complete(data).tolist() == [True, True, True, False, True]
    assert found.micro(data)[1].valid.tolist() == [[True, True]] * 3 + [[True, False], [True, True]]


def exchanged(sent, one: int, other: int):
    """The blocks of two records, each in the place of the other."""
    blocks = list(sent.blocks)
    blocks[one] = replace(sent.blocks[one], parts=sent.blocks[other].parts)
    blocks[other] = replace(sent.blocks[other], parts=sent.blocks[one].parts)
    return replace(sent, blocks=tuple(blocks))


def test_routes_of_two_samples_that_were_exchanged_are_noticed(one_rank):
    """They are equally long, and each is whole: no size and no checksum of rows tells them apart,
    and an audit compares with what came."""
    sequences = [[1, 2, 3, 4], [1, 2, 5, 4], [1, 2, 3, 6]]  # the last token is not fed
    batch = TrainBatch.from_sequences(sequences)
    sent = send(written_policy.table_of(sequences), PIECES, block_bytes=1)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        routes = one_rank.Routes([exchanged(sent, one, other)], PIECES)
        routes.check_samples(batch.lengths())
        if (one, other) == (0, 2):  # what was fed is the same
            routes.fetch([0, 1, 2], batch.fed)
            continue
        with pytest.raises(ReplayError, match=r"sample [01]: its routes are those of other tokens"):
            routes.fetch([0, 1, 2], batch.fed)
    one_rank.Routes([sent], PIECES).fetch([0, 1, 2], batch.fed)


def test_turns_that_were_exchanged_are_noticed(one_rank):
    """Of one sample, and of two."""
    batch, turned = TrainBatch.from_sequences(SEQUENCES), cut_into_turns()
    rows = np.diff(turned.offsets).tolist()
    assert rows == [3, 1, 3, 2, 2, 3]
    for one, other, sample in ((0, 2, 0), (0, 5, 0), (3, 4, 1)):
        routes = one_rank.Routes([exchanged(turned, one, other)], PIECES)
        with pytest.raises(ReplayError, match=f"sample {sample}: its routes are those of other"):
            routes.fetch([0, 1, 2], batch.fed)


def test_the_batch_is_bound_too_whichever_of_the_two_was_exchanged(one_rank):
    batch = TrainBatch.from_sequences([[1, 2, 3, 4], [1, 2, 5, 4]])
    routes = one_rank.Routes([written_policy.table_of([[1, 2, 3, 4], [1, 2, 5, 4]])], PIECES)
    batch.token_ids[1][2] = 7
    routes.fetch([0], batch.fed)
    with pytest.raises(ReplayError, match="sample 1: its routes are those of other tokens"):
        routes.fetch([1], batch.fed)
