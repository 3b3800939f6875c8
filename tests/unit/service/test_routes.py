"""Routes found by tokens: never those of other tokens, whatever was kept and has gone."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.router_replay.packed import PackedRoutes
from lora_moe_rl.router_replay.table import RouteTable, token_sum
from lora_moe_rl.router_replay.travel import SentRoutes, fetch, send
from lora_moe_rl.service.routes import Origin, RouteStore

LAYERS, EXPERTS, TOP_K = (1, 2, 3), 16, 2
SHAPE = SimpleNamespace(num_layers=4, moe_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
PIPELINE = TrainerConfig(world_size=2, pp=2)
PIECES = [(1,), (2, 3)]
ROW, TOKEN = 1 + 2, 8  # bytes: of 2 and 4 ids of 4 bits each; a token and its logprob
TOKENS = st.lists(st.integers(0, 2), min_size=2, max_size=9)


def rows_of(tokens: list[int], recording: int = 0) -> np.ndarray:
    """Experts of each token that is fed, [L - 1, layers, top_k]: they follow from all tokens up to
    it, as a model's do, and from which recording it is."""
    found = []
    for stop in range(1, len(tokens)):
        draw = np.random.default_rng([recording, *tokens[:stop]])
        found.append([draw.permutation(EXPERTS)[:TOP_K] for _ in LAYERS])
    return np.array(found)


def sent(tokens: list[int], recording: int = 0, known: int | None = None) -> SentRoutes:
    rows = rows_of(tokens, recording)[:known]
    table = RouteTable.build([rows], [len(tokens) - 1], LAYERS, EXPERTS, TOP_K)
    return send(replace(table, token_sums=np.array([token_sum(tokens[:-1])], np.uint64)), PIECES)


def ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def put(store: RouteStore, tokens: list[int], *recording: int, logprobs=(-1.0,)) -> None:
    store.put(ids(tokens), sent(tokens, *recording), np.array(logprobs, np.float32))


def check(found, tokens: list[int], recorded: int, *recording: int) -> None:
    """Of a datum that feeds `tokens`."""
    table = found.routes.of_sample(0)
    assert found.recorded == recorded and found.routes.num_samples == 1
    assert found.routes.num_rows == len(table.ids) == len(tokens)
    assert table.valid[:recorded].all() and not table.valid[recorded:].any()
    np.testing.assert_array_equal(
        table.ids[:recorded], rows_of([*tokens, 0], *recording)[:recorded]
    )
    np.testing.assert_array_equal(found.routes.missing, (~table.valid).sum(axis=0))
    lacking = np.arange(recorded, len(tokens))
    np.testing.assert_array_equal(found.routes.incomplete, lacking)
    assert found.routes.first_missing == ((recorded, LAYERS[0]) if len(lacking) else None)


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, max_size=8), st.lists(TOKENS, min_size=1, max_size=4), st.integers(0, 300))
def test_a_datum_has_the_rows_of_what_was_sampled_as_far_as_its_tokens_are_those(
    samples, data, limit
):
    store = RouteStore(SHAPE, PIPELINE, limit)
    for tokens in samples:
        put(store, tokens)
        assert store.bytes <= limit
    kept, room = [], limit
    for tokens in reversed(samples):  # nothing was asked for: the newest are there
        if (room := room - ROW * (len(tokens) - 1) - TOKEN * len(tokens)) < 0:
            break
        kept.append(tokens[:-1])
    assert len(store) == len(kept)
    for tokens in [*data, *samples]:
        there = (next((i for i, (a, b) in enumerate(zip(tokens, one, strict=False)) if a != b),
                      min(len(tokens), len(one))) for one in kept)  # fmt: skip
        check(store.find(ids(tokens)), tokens, max(there, default=0))


def test_a_datum_is_a_whole_sample_or_begins_like_one_or_is_a_part_of_one():
    store = RouteStore(SHAPE, PIPELINE)
    put(store, [5, 6, 7, 8, 9])
    check(store.find(ids([5, 6, 7, 8])), [5, 6, 7, 8], 4)
    check(store.find(ids([5, 6, 7, 8, 9, 4])), [5, 6, 7, 8, 9, 4], 4)  # 9 was never fed
    check(store.find(ids([5, 6])), [5, 6], 2)
    check(store.find(ids([5, 6, 9])), [5, 6, 9], 2)
    check(store.find(ids([6, 7, 8])), [6, 7, 8], 0)
    check(RouteStore(SHAPE, PIPELINE).find(ids([1])), [1], 0)
    assert store.counts == {
        "data": 5, "data_in_full": 2, "data_in_part": 2, "rows": 18, "rows_found": 12
    }  # fmt: skip


def test_of_equal_tokens_those_with_the_datums_own_logprobs_are_found():
    """Else the newest. A prompt's logprobs are 0, and of no sample."""
    store, tokens = RouteStore(SHAPE, PIPELINE), [5, 6, 7, 8, 9]
    values = np.array([[-1.5, -0.25, -3.0]] * 3, np.float32)
    values[1, 1] = np.nextafter(values[1, 1], np.float32(0))
    put(store, tokens, 1, logprobs=values[0])
    put(store, tokens, 2, logprobs=values[1])
    put(store, [5, 6, 7, 8, 9, 4], 3)  # another turn, whose prompt has all of it
    fed = ids(tokens[:-1])
    check(store.find(fed), tokens[:-1], 4, 3)
    for recording in (1, 2):
        datum = np.concatenate([[0.0], values[recording - 1]]).astype(np.float32)
        check(store.find(fed, datum), tokens[:-1], 4, recording)
        check(store.find(fed[:3], datum[:3]), tokens[:3], 3, recording)
    check(store.find(fed, np.zeros(4, np.float32)), tokens[:-1], 4, 3)
    check(store.find(fed, np.full(4, -7, np.float32)), tokens[:-1], 4, 3)


def test_those_go_first_that_were_last_asked_for_longest_ago():
    size = ROW * 3 + TOKEN * 4
    store = RouteStore(SHAPE, PIPELINE, 2 * size)
    put(store, [1, 1, 1, 1])
    put(store, [2, 2, 2, 2])
    store.find(ids([1, 1, 1]))
    put(store, [3, 3, 3, 3])
    found = [store.find(ids([token] * 3)).recorded for token in (1, 2, 3)]
    assert found == [3, 0, 3] and store.bytes == 2 * size and store.counts["evicted"] == 1
    put(store, [4] * 20)  # more than there is room for
    assert len(store) == store.bytes == 0


def test_rows_that_an_engine_did_not_record_are_missing_and_are_not_cut():
    store, tokens = RouteStore(SHAPE, PIPELINE), [5, 6, 7, 8, 9]
    store.put(ids(tokens), sent(tokens, known=2), np.array([-1.0], np.float32))
    whole = store.find(ids(tokens[:-1]))
    assert whole.recorded == 4 and whole.routes.incomplete.tolist() == [2, 3]
    check(store.find(ids(tokens[:3])), tokens[:3], 2)
    store.put(ids([1, 2, 3]), sent([1, 2, 3], known=0), np.array([-1.0], np.float32))
    check(store.find(ids([1])), [1], 0)


def test_what_is_not_of_a_sample_is_refused():
    store, one = RouteStore(SHAPE, PIPELINE), np.array([-1.0], np.float32)
    with pytest.raises(ValueError, match=r"routes of \(4,\) rows"):
        store.put(ids([1, 2, 3]), sent([1, 2, 3, 4, 5]), one)
    with pytest.raises(ValueError, match="are not of a sample with"):
        RouteStore(SHAPE, TrainerConfig()).put(ids([1, 2]), sent([1, 2]), one)
    with pytest.raises(ValueError, match="0 logprobs are not of a sample of 2 tokens"):
        store.put(ids([1, 2]), sent([1, 2]), one[:0])
    assert len(store) == store.bytes == 0


def test_data_get_the_routes_of_their_own_models_samples():
    """Two models may write the same, on routes of their own."""
    store = RouteStore(SHAPE, PIPELINE)
    tokens = [5, 6, 7, 8]
    for model in (0, 1):
        given = sent(tokens, model)
        store.put(ids(tokens), given, np.array([-1.0], np.float32), Origin(model, 0))
    for model in (0, 1):
        check(store.find(ids(tokens[:-1]), None, Origin(model, 0)), tokens[:-1], 3, model)
    check(store.find(ids(tokens[:-1]), None, Origin(2, 0)), tokens[:-1], 0)


def test_a_text_without_logprobs_gets_the_routes_of_its_models_state_of_now_alone():
    """Those of an older state are of a function that is not asked for; one with logprobs is trained
    on what was done."""
    store, logprobs = RouteStore(SHAPE, PIPELINE), np.array([-1.5, -2.0], np.float32)
    old, new, older = [5, 6, 7, 8, 9], [5, 6, 7, 4, 4], [5, 6, 7, 8, 1]
    for tokens, state in ((old, 1), (new, 2)):
        store.put(ids(tokens), sent(tokens, state), logprobs, Origin(0, state))
    fed = ids(old[:-1])
    check(store.find(fed, None, Origin(0, 1)), old[:-1], 4, 1)
    check(store.find(fed, None, Origin(0, 2)), old[:-1], 3, 2)  # as far as it is the new one's
    check(store.find(fed, np.zeros(4, np.float32), Origin(0, 2)), old[:-1], 3, 2)
    check(store.find(fed, None, Origin(0, 3)), old[:-1], 0)
    datum = np.concatenate([[0.0, 0.0], logprobs]).astype(np.float32)
    check(store.find(fed, datum, Origin(0, 3)), old[:-1], 4, 1)
    # An old sampler samples on: of the new state less is found, and nothing wrong.
    store.put(ids(older), sent(older, 1), logprobs, Origin(0, 1))
    check(store.find(ids(new[:-1]), None, Origin(0, 2)), new[:-1], 4, 2)
    check(store.find(ids(new[:3]), None, Origin(0, 2)), new[:3], 0)


def test_a_sample_whose_tokens_were_all_sure_is_found_in_whichever_state_sampled_it():
    """Its logprobs are 0, as those of a prompt are."""
    store, tokens = RouteStore(SHAPE, PIPELINE), [1, 2, 3, 4]
    sure = np.zeros(2, np.float32)
    store.put(ids(tokens), sent(tokens, 1), sure, Origin(0, 1))
    store.put(ids(tokens), sent(tokens, 2), sure - 1, Origin(0, 2))
    datum = np.zeros(3, np.float32)
    check(store.find(ids(tokens[:-1]), datum, Origin(0, 3)), tokens[:-1], 3, 1)
    check(store.find(ids([1, 5, 6]), datum, Origin(0, 3)), [1, 5, 6], 0)
    assert store.find(ids([7, 8]), datum[:2], Origin(0, 3)).recorded == 0


@pytest.mark.parametrize("rows", [2, 4])
def test_what_is_found_is_bound_to_the_datums_own_tokens(rows):
    store, tokens = RouteStore(SHAPE, PIPELINE), [5, 6, 7, 8, 9]
    put(store, tokens)
    for part in fetch(store.find(ids(tokens[:rows])).routes.blocks[0].parts):
        found = PackedRoutes.from_bytes(part)
        assert found.token_sums.tolist() == [token_sum(tokens[:rows])]
    store.put(ids([1, 2, 3, 4, 5]), sent(tokens), np.array([-1.0], np.float32))
    with pytest.raises(ReplayError, match="its routes are those of other tokens"):
        for part in fetch(store.find(ids([1, 2, 3, 4][:rows])).routes.blocks[0].parts):
            PackedRoutes.from_bytes(part).check_tokens(0, token_sum([1, 2, 3, 4]), "sample 0")
