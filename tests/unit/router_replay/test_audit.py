"""What the audit has to have seen: every token of its samples that has routes, in every layer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import pack
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.router_replay.table import RouteTable

pytestmark = pytest.mark.seconds  # imports Megatron
LAYERS, EXPERTS, TOP_K = (1, 2), 6, 2


class Dispatcher:
    """Takes a router's map, as mcore's does."""

    routing_map = None

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        self.routing_map = routing_map


@pytest.fixture
def audited(monkeypatch):
    """Two samples in one micro-batch on one rank, the second of which has no routes for one token:
    the audit, its layers, and maps that are as recorded."""
    import torch

    from lora_moe_rl.router_replay import audit, routes

    for cut in ("tensor_model", "context"):
        monkeypatch.setattr(routes.ps, f"get_{cut}_parallel_world_size", lambda: 1)
        monkeypatch.setattr(routes.ps, f"get_{cut}_parallel_rank", lambda: 0)
    batch = TrainBatch.from_sequences([np.arange(5), np.arange(10, 14)], step=1)
    draw = np.random.default_rng(0)
    ids = np.argsort(draw.random((7, len(LAYERS), EXPERTS)), axis=-1)[..., :TOP_K]
    table = RouteTable.build([ids[:4], ids[4:6]], [4, 3], LAYERS, EXPERTS, TOP_K)
    found = routes.Routes([table], [LAYERS])
    found.fetch([0, 1])
    data = pack(batch, [0, 1], multiple=1)
    layers = {
        number: SimpleNamespace(
            number=number, micro_batch=data, moe=SimpleNamespace(token_dispatcher=Dispatcher())
        )
        for number in LAYERS
    }
    made = audit.Audit(SimpleNamespace(chunks=[layers]))
    made.start(found, batch, 2)
    maps = {}
    for column, number in enumerate(LAYERS):
        chosen = torch.zeros(7, EXPERTS, dtype=torch.bool)
        maps[number] = chosen.scatter(1, torch.from_numpy(ids[:, column].copy()), True)
    return made, layers, maps


def dispatch(layer, chosen) -> None:
    layer.moe.token_dispatcher.dispatch_preprocess(None, chosen, None)


def test_tokens_without_routes_need_not_be_seen(audited):
    audit, layers, maps = audited
    for number, layer in layers.items():
        dispatch(layer, maps[number])
    audit.check()
    assert audit.compared == {1: 6, 2: 6} and audit.expected == 6
    audit.check_compared(1, audit.compared)


@pytest.mark.parametrize("fault", ["never ran", "routed by itself"])
def test_a_layer_that_did_not_replay_is_named_though_the_others_did(audited, fault):
    audit, layers, maps = audited
    dispatch(layers[1], maps[1])
    if fault == "routed by itself":
        layers[2].micro_batch = None  # nothing was installed
        dispatch(layers[2], maps[2].flip(1))
    audit.check()
    everywhere = {number: audit.compared[number] for number in LAYERS}
    with pytest.raises(
        ReplayError, match="audit of step 9 compared the routes of 0 tokens in laye"
    ):
        audit.check_compared(9, everywhere)


def test_one_token_too_few_is_too_few(audited):
    audit, _, _ = audited
    audit.check_compared(1, {1: 6.0, 2: 12.0})  # two forwards of one layer
    with pytest.raises(ReplayError, match="5 tokens in layer 1, and 6 of its samples"):
        audit.check_compared(1, {1: 5.0, 2: 6.0})
