"""The route table: building, checking, joining."""

import numpy as np
import pytest

from lora_moe_rl.errors import ReplayError
from lora_moe_rl.router_replay.table import RouteTable, Segment

LAYERS = (1, 3)
EXPERTS, TOP_K = 8, 2


def routes(num_rows: int, seed: int = 0) -> np.ndarray:
    """Different experts in each row, `[rows, layers, top_k]`."""
    generator = np.random.default_rng(seed)
    return np.stack(
        [[generator.permutation(EXPERTS)[:TOP_K] for _ in LAYERS] for _ in range(num_rows)]
    ).astype(np.uint8)


def build(rows, num_rows, experts: int = EXPERTS) -> RouteTable:
    return RouteTable.build(rows, num_rows, LAYERS, experts, TOP_K)


def test_rows_lie_one_sample_after_the_other():
    first, second = routes(3), routes(5, seed=1)
    table = build([first, second], [3, 5])
    np.testing.assert_array_equal(table.offsets, [0, 3, 8])
    np.testing.assert_array_equal(table.ids[3:8], second)
    assert table.num_samples == 2 and table.coverage == 1.0


def test_missing_rows_are_explicit():
    table = build([None, routes(2)], [3, 4])
    np.testing.assert_array_equal(table.valid[:, 0], [0, 0, 0, 1, 1, 0, 0])
    assert table.coverage == pytest.approx(2 / 7)


def test_ids_take_one_byte_up_to_256_experts():
    assert build([routes(2)], [2], experts=256).ids.dtype == np.uint8
    assert build([routes(2)], [2], experts=257).ids.dtype == np.uint16


def test_an_expert_out_of_range_is_an_error():
    bad = routes(4)
    bad[2, 1] = (3, EXPERTS)
    with pytest.raises(ReplayError, match=r"row 2, layer 3 are \[3, 8\]"):
        build([bad], [4])


def test_an_expert_named_twice_is_an_error():
    bad = routes(4)
    bad[1, 0] = (5, 5)
    with pytest.raises(ReplayError, match=r"row 1, layer 1 are \[5, 5\]"):
        build([bad], [4])


@pytest.mark.parametrize(
    "array", [routes(5), routes(3)[:, :1], routes(3)[..., :1]], ids=["rows", "layers", "top_k"]
)
def test_another_shape_is_an_error(array):
    with pytest.raises(ReplayError, match="expected at most"):
        build([array], [4])


def test_concat_keeps_the_samples():
    tables = [build([routes(3), None], [3, 2]), build([routes(4, seed=2)], [4])]
    table = RouteTable.concat(tables)
    np.testing.assert_array_equal(table.offsets, [0, 3, 5, 9])
    np.testing.assert_array_equal(table.ids[5:], tables[1].ids)
    np.testing.assert_array_equal(table.valid[:, 0], [1, 1, 1, 0, 0, 1, 1, 1, 1])
    assert RouteTable.concat(tables[:1]) is tables[0]


def test_an_id_that_does_not_fit_is_an_error_and_not_another_expert():
    for wrong in (-1, 256):
        bad = routes(4).astype(np.int16)
        bad[2, 1, 0] = wrong
        with pytest.raises(ReplayError, match=rf"sample 0, token 2: .* \[{wrong}, \d+\]"):
            build([bad], [4], experts=256)


def test_turns_are_joined_and_the_first_forward_of_a_token_counts():
    """Request 1: 3 prompt tokens, 2 sampled. Request 2: those, 2 of a tool, 3 sampled."""
    first, second = routes(4), routes(9, seed=1)
    table = build([[Segment(0, first), Segment(0, second)]], [9])
    np.testing.assert_array_equal(table.ids[:4], first)
    np.testing.assert_array_equal(table.ids[4:], second[4:])
    assert table.valid.all()
    trimmed = build([[Segment(0, first), Segment(6, second[6:])]], [9])
    np.testing.assert_array_equal(trimmed.ids[6:], second[6:])
    np.testing.assert_array_equal(trimmed.valid[:, 0], [1, 1, 1, 1, 0, 0, 1, 1, 1])
    with pytest.raises(ReplayError, match="from token 6 on"):
        build([[Segment(6, second)]], [9])


def test_layers_are_joined():
    table = build([routes(5), None], [5, 3])
    parts = [
        RouteTable(table.ids[:, i : i + 1], table.valid[:, i : i + 1], table.offsets, (layer,), 8)
        for i, layer in enumerate(LAYERS)
    ]
    joined = RouteTable.join_layers(parts)
    assert joined.layers == LAYERS
    np.testing.assert_array_equal(joined.ids, table.ids)
    np.testing.assert_array_equal(joined.valid, table.valid)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, bool])
def test_what_is_no_integer_is_an_error_and_is_not_cut_to_one(dtype):
    with pytest.raises(ReplayError, match=f"sample 1: routes are {np.dtype(dtype)}, and experts"):
        build([routes(2), np.array([[[0.25, 1.75]] * 2] * 3, dtype)], [2, 3])
    assert build([routes(2).astype(np.int64)], [2]).valid.all()


def test_a_buffer_of_zeros_is_refused_where_a_token_has_several_experts():
    """With one it may be what the router chose."""
    with pytest.raises(ReplayError, match=r"row 0, layer 1 are \[0, 0\]"):
        build([np.zeros((3, 2, 2), np.uint8)], [3])
    zeros = np.zeros((3, 2, 1), np.uint8)
    assert RouteTable.build([zeros], [3], LAYERS, EXPERTS, 1).valid.all()
