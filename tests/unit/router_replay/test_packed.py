"""Packed routes: exact, self-describing, cut without unpacking, and any flipped bit is named."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_moe_rl.errors import ReplayError
from lora_moe_rl.kernels.route_codec import RowLayout, cut_array, naive, pack_array
from lora_moe_rl.router_replay.packed import PackedRoutes
from lora_moe_rl.router_replay.table import RouteTable, token_sum
from lora_moe_rl.router_replay.travel import absent, head, join, send


def make_table(num_rows, layers, experts, top_k, seed=0, missing=0.0) -> RouteTable:
    rng = np.random.default_rng(seed)
    keys = rng.random((sum(num_rows), len(layers), experts))
    ids = np.argsort(keys, axis=-1)[..., :top_k]
    dtype = np.uint8 if experts <= 256 else np.uint16
    valid = rng.random((sum(num_rows), len(layers))) >= missing
    offsets = np.concatenate([[0], np.cumsum(num_rows)])
    return RouteTable((ids * valid[..., None]).astype(dtype), valid, offsets, layers, experts)


def assert_equal(got: RouteTable, expected: RouteTable) -> None:
    assert (got.layers, got.num_experts) == (expected.layers, expected.num_experts)
    np.testing.assert_array_equal(got.offsets, expected.offsets)
    np.testing.assert_array_equal(got.valid, expected.valid)
    np.testing.assert_array_equal(got.ids, expected.ids)


SHAPES = st.tuples(
    st.integers(1, 9),  # layers
    st.sampled_from([2, 3, 8, 13, 64, 128, 256, 257, 384, 1000]),  # experts
    st.integers(1, 9),  # top_k
)


@given(shape=SHAPES, rows=st.lists(st.integers(0, 5), min_size=1, max_size=4), data=st.data())
def test_cut_of_packed_rows_is_the_packed_cut(shape, rows, data):
    """Beside the reference codec, which goes bit by bit."""
    num_layers, experts, top_k = shape
    top_k = min(top_k, experts)
    first = data.draw(st.integers(0, num_layers - 1))
    count = data.draw(st.integers(1, num_layers - first))
    table = make_table(rows, tuple(range(num_layers)), experts, top_k)
    whole = RowLayout(num_layers, top_k, experts)
    cut = cut_array(pack_array(table.ids, whole), whole, first, count)
    expected = naive.pack(table.ids[:, first : first + count], RowLayout(count, top_k, experts))
    np.testing.assert_array_equal(cut, expected)


@given(shape=SHAPES, missing=st.sampled_from([0.0, 0.3]))
def test_bytes_and_back(shape, missing):
    num_layers, experts, top_k = shape
    layers = tuple(range(3, 3 + 2 * num_layers, 2))
    table = make_table([4, 0, 3], layers, experts, min(top_k, experts), missing=missing)
    packed = PackedRoutes.from_bytes(PackedRoutes.pack(table).to_bytes())
    assert_equal(packed.unpack(), table)


def test_layers_and_samples_are_cut_with_their_validity():
    table = make_table([3, 2, 4], (1, 2, 4, 7), 10, 3, missing=0.4)
    piece = PackedRoutes.pack(table, 1, 3).cut((2, 4))
    got = PackedRoutes.from_bytes(piece.to_bytes()).unpack()
    expected = RouteTable(table.ids[3:, 1:3], table.valid[3:, 1:3], np.array([0, 2, 6]), (2, 4), 10)
    assert_equal(got, expected)
    with pytest.raises(ReplayError, match="no run of layers"):
        piece.cut((2, 7))


def test_a_row_takes_as_many_bits_as_its_ids():
    assert RowLayout(60, 8, 384).row_bytes == 540 and RowLayout(48, 8, 128).row_bytes == 336
    table = make_table([100], tuple(range(48)), 128, 8)
    header = 24 + 4 * 48 + 8 * 2 + 8 + 8 + 8
    assert PackedRoutes.pack(table).to_bytes().nbytes == 100 * 336 + header


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_every_flipped_byte_is_noticed(missing):
    table = make_table([2, 3], (0, 1, 2), 9, 2, missing=missing)
    data = PackedRoutes.pack(table).to_bytes()
    for place in range(len(data)):
        broken = data.copy()
        broken[place] ^= 1 << place % 8
        with pytest.raises(ReplayError):
            PackedRoutes.from_bytes(broken).unpack()


def test_the_sample_of_a_flipped_byte_is_named_and_the_others_are_good():
    packed = PackedRoutes.pack(make_table([2, 3, 2], (0, 1, 2), 9, 2))
    data = packed.to_bytes()
    data[len(data) - 3 * packed.layout.row_bytes] ^= 4  # the last row of sample 1
    broken = PackedRoutes.from_bytes(data)
    broken.check(0, "sample 7")
    broken.check(2, "sample 9")
    with pytest.raises(ReplayError, match="sample 8: routes of layers 0 to 2 are corrupt"):
        broken.check(1, "sample 8")


def test_other_bytes_are_refused():
    data = PackedRoutes.pack(make_table([2], (0,), 9, 2)).to_bytes()
    newer = data.copy()
    newer[4] += 1
    for bad, message in (
        (data[:10], "less than a header"),
        (newer, "version 3"),
        (np.zeros(60, np.uint8), "begin with"),
        (data[:-1], "have 1 bytes"),
    ):
        with pytest.raises(ReplayError, match=message):
            PackedRoutes.from_bytes(bad)


@pytest.mark.parametrize("block_bytes", [1, 30, 10**6])
def test_sent_routes_are_the_table(block_bytes):
    table = make_table([3, 0, 2, 9, 1], (1, 2, 5, 6), 12, 3, seed=1, missing=0.2)
    sent = send(table, [(1, 2), (), (5, 6)], block_bytes=block_bytes)
    assert [(b.first, b.stop) for b in sent.blocks][-1][1] == 5
    assert len(sent.blocks) == {1: 5, 30: 3, 10**6: 1}[block_bytes]
    assert_equal(sent.table(), table)
    np.testing.assert_array_equal(sent.missing, (~table.valid).sum(axis=0))
    rows, columns = np.nonzero(~table.valid)
    assert sent.first_missing == (rows[0], table.layers[columns[0]])
    np.testing.assert_array_equal(sent.incomplete, np.unique(rows))
    with pytest.raises(ValueError, match="are not the layers"):
        send(table, [(1, 2), (5,)])


def test_the_end_of_the_node_that_has_routes_is_named(monkeypatch):
    import ray

    def get(refs):
        raise ray.exceptions.ObjectLostError("ab", None, "")

    monkeypatch.setattr(ray, "get", get)
    sent = send(make_table([3], (1,), 8, 2), put=lambda part: "a reference")
    said = r"rollout are lost with the node .*ObjectLostError.* --resume"
    with pytest.raises(ReplayError, match=said):
        sent.table()


def test_turns_that_cannot_follow_each_other_are_refused():
    table, other = make_table([3], (1, 2), 8, 2), make_table([3], (1, 3), 8, 2)
    with pytest.raises(ValueError, match="are of 2 records, not of one"):
        join([[send(make_table([3, 2], (1, 2), 8, 2))]])
    with pytest.raises(ValueError, match="cannot follow"):
        join([[send(table), send(other)]])


def test_the_first_row_that_is_missing_is_found_in_joined_turns():
    whole, holes = make_table([3], (1, 2), 8, 2), make_table([4], (1, 2), 8, 2, missing=0.5)
    found = join([[send(whole), send(holes)], [send(holes)]])
    row, layer = send(holes).first_missing
    assert found.first_missing == (3 + row, layer)
    lacking = np.flatnonzero(~holes.valid.all(axis=1))
    np.testing.assert_array_equal(found.incomplete, [*(lacking + 3), *(lacking + 7)])
    np.testing.assert_array_equal(found.missing, 2 * (~holes.valid).sum(axis=0))
    np.testing.assert_array_equal(found.sample_offsets, [0, 7, 11])


@pytest.mark.parametrize("num_rows", [0, 1, 4, 9])
def test_the_first_rows_of_a_record_and_rows_that_nobody_recorded_make_one_sample(num_rows):
    table = make_table([9], (1, 2, 5, 6), 12, 3, seed=1)
    pieces = [(1, 2), (5, 6)]
    whole = send(table, pieces)
    joined = join([[head(whole, num_rows), absent(pieces, 3, 12, 2)]])
    found = joined.of_sample(0)
    assert joined.num_rows == len(found.ids) == num_rows + 2
    np.testing.assert_array_equal(found.ids[:num_rows], table.ids[:num_rows])
    assert found.valid[:num_rows].all() and not found.valid[num_rows:].any()
    np.testing.assert_array_equal(joined.missing, (~found.valid).sum(axis=0))
    assert joined.incomplete.tolist() == [num_rows, num_rows + 1]
    assert joined.first_missing == (num_rows, 1)


def test_what_cannot_be_cut_is_refused():
    holes = make_table([4], (1, 2), 8, 2)
    holes.valid[2, 1] = False
    sent = send(holes)
    assert head(sent, 4) is sent and len(head(sent, 2).incomplete) == 0
    with pytest.raises(ValueError, match="row 2 lacks a layer"):
        head(sent, 3)
    with pytest.raises(ValueError, match="5 rows are not the first"):
        head(sent, 5)
    with pytest.raises(ValueError, match="are not the first of records"):
        head(send(make_table([3, 2], (1, 2), 8, 2)), 2)
    part = send(make_table([4], (1, 2), 8, 2)).blocks[0].parts[0].copy()
    part[-1] ^= 1  # of the last row, which is cut away: a checksum is of all
    with pytest.raises(ReplayError, match="corrupt"):
        PackedRoutes.from_bytes(part).head(1)


def test_what_tokens_routes_are_of_is_kept_through_every_cut():
    table = make_table([3, 2], (1, 2, 5), 8, 2)
    bound = replace(
        table, token_sums=np.array([token_sum([7, 8, 9]), token_sum([4, 4])], np.uint64)
    )
    packed = PackedRoutes.from_bytes(PackedRoutes.pack(bound).cut((2, 5)).to_bytes())
    packed.check_tokens(0, token_sum([7, 8, 9]), "sample 0")
    packed.check_tokens(1, 0, "sample 1")  # not told
    PackedRoutes.pack(table).check_tokens(0, token_sum([1]), "sample 0")
    for tokens in ([7, 8], [7, 9, 8], [4, 4]):
        with pytest.raises(ReplayError, match="sample 5: its routes are those of other tokens"):
            packed.check_tokens(0, token_sum(tokens), "sample 5")
    one, other = RouteTable.concat([bound, table]), send(bound, block_bytes=1).table()
    np.testing.assert_array_equal(one.token_sums, [*bound.token_sums, 0, 0])
    np.testing.assert_array_equal(other.token_sums, bound.token_sums)
    assert join([[send(make_table([3], (1,), 8, 2))] * 2]).table().token_sums is None


def test_the_first_rows_of_a_record_are_of_its_first_tokens():
    whole = replace(make_table([4], (1, 2), 8, 2), token_sums=np.array([token_sum([7, 8, 9, 6])]))
    cut = head(send(whole), 2, token_sum([7, 8, 9, 6]), token_sum([7, 8]))
    part = cut.blocks[0].parts[0].made(send(whole).blocks[0].parts[0])
    PackedRoutes.from_bytes(part).check_tokens(0, token_sum([7, 8]), "sample 0")
    with pytest.raises(ReplayError, match="routes that are cut: its routes are those of other"):
        head(send(whole), 2, token_sum([7, 8, 9, 5]), token_sum([7, 8])).of_sample(0)
