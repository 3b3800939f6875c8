"""The experts that tokens.jsonl keeps of a sample's tokens are those that its engine recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.files.sample_records import routes_record
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.table import Segment as Recorded
from lora_moe_rl.router_replay.travel import join, send

pytestmark = pytest.mark.seconds  # imports torch
LAYERS, EXPERTS, TOP_K = (1, 3), 8, 2
PROMPT, RESPONSES = [5, 6], ([7, 8, 9], [7, 2])


def ids_of(rows: int, seed: int) -> np.ndarray:
    keys = np.random.default_rng(seed).random((rows, len(LAYERS), EXPERTS))
    return np.argsort(keys, axis=-1)[..., :TOP_K]


IDS = [ids_of(len(PROMPT) + len(response) - 1, seed) for seed, response in enumerate(RESPONSES)]


def table(rows) -> RouteTable:
    return RouteTable.build(rows, [len(ids) for ids in IDS], LAYERS, EXPERTS, TOP_K)


def group(routes) -> Group:
    given = [
        Sample((Segment.given("user", PROMPT), Segment.given("policy", response)), "stop", "")
        for response in RESPONSES
    ]
    prompt = Prompt(number=0, text="", token_ids=PROMPT)
    return Group(prompt, given, routes, np.zeros(len(given), np.float32))


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_each_token_has_the_experts_of_its_own_row_and_the_last_one_none(block_bytes):
    one = group(send(table(IDS), block_bytes=block_bytes))
    for i, ids in enumerate(IDS):
        found = routes_record(one, i)
        assert found["layers"] == list(LAYERS)
        assert found["experts"] == [*ids[len(PROMPT) :].tolist(), None]


def test_of_several_turns_too():
    turns = [
        RouteTable.build([ids], [len(ids)], LAYERS, EXPERTS, TOP_K)
        for ids in (IDS[0][:3], IDS[0][3:], IDS[1])
    ]
    first, rest, other = map(send, turns)
    one = group(join([[first, rest], [other]]))
    assert routes_record(one, 0)["experts"] == [*IDS[0][2:].tolist(), None]
    assert routes_record(one, 1)["experts"] == [*IDS[1][2:].tolist(), None]


def test_a_token_whose_routes_are_missing_has_none():
    rows = [[Recorded(0, IDS[0][:2]), Recorded(3, IDS[0][3:])], IDS[1]]
    found = routes_record(group(send(table(rows))), 0)["experts"]
    assert found == [None, IDS[0][3].tolist(), None]


def test_nothing_is_kept_of_what_has_no_row_for_each_token():
    one = group(send(table(IDS)))
    one.samples[0] = replace(one.samples[0], splits=(2,))
    assert routes_record(one, 0) == {} != routes_record(one, 1)
    assert routes_record(group(None), 0) == {}
