"""How many tokens go to each expert is told by the routes, before the forwards: it changes no
number, and no dispatcher of Megatron-core asks for it."""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest
from ranks import random_adapter, random_batch, run_ranks

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.models.directory import resolve_model

LAYOUTS = [
    {"world_size": 2, "ep": 2},
    {"world_size": 2, "tp": 2, "ep": 2},
    {"world_size": 2, "tp": 2, "ep": 1, "etp": 2},
    {"world_size": 2, "ep": 2, "recompute": "full"},
    {"world_size": 2, "cp": 2, "ep": 2},
    pytest.param({"world_size": 4, "ep": 2, "pp": 2, "vpp": 2}, marks=pytest.mark.slow),
]


def config_of(model: str, replay=(), **trainer) -> RunConfig:
    trainer = {"micro_batch_tokens": 60, "device": "cpu", **trainer}
    return RunConfig(model=model, trainer=trainer, replay={"audit": 0, **dict(replay)})


def asked(engine) -> Counter[int]:
    """Filled with how often the dispatcher of each layer asks."""
    found: Counter[int] = Counter()
    for number, layer in engine.replay.layers.items():

        def upstream(routing_map, number=number, stock=layer.dispatch.upstream):
            found[number] += 1
            return stock(routing_map)

        layer.dispatch.upstream = upstream
    return found


def told_and_not(worker, spec, holes=()):
    """Of a step whose sizes are told, and of one where they are not: (loss, norm, gradient by
    tensor, how often dispatchers asked, forwards of a chunk, micro-batches)."""
    engine, found = worker.engine, []
    counts = asked(engine)
    for asks in (engine.exchange.asks, False):
        engine.exchange.asks = asks
        counts.clear()
        worker.set_adapter(random_adapter(spec))
        batch, table = random_batch(spec, 16)
        valid = table.valid.copy()
        valid[list(holes)] = False
        loss, norm, shards = worker.gradients(batch, dataclasses.replace(table, valid=valid))
        gradient = {(shard.name, shard.start): shard.data for shard in shards}
        again = engine.trained[0] if worker.config.trainer.recompute == "full" else 0
        times = engine.forwards[0] + again, engine.trained[0]
        found.append((loss, norm, gradient, dict(counts), *times))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_dispatcher_asks_and_no_number_changes(layout):
    config = config_of("qwen3_moe", **layout)
    for told, not_told in run_ranks(config, resolve_model("qwen3_moe"), told_and_not):
        assert told[:2] == not_told[:2] and told[2].keys() == not_told[2].keys()
        for name, values in told[2].items():
            assert np.array_equal(values, not_told[2][name]), name
        assert told[3] == {}
        assert set(not_told[3].values()) == {not_told[4]} and not_told[4] > 1


def test_where_a_rank_misses_routes_all_ask_in_that_micro_batch():
    config = config_of("qwen3_moe", {"missing": "route"}, world_size=2, ep=2)
    one_token = [5]  # of one sample, so on one rank
    everyone = run_ranks(config, resolve_model("qwen3_moe"), told_and_not, one_token)
    for told, not_told in everyone:
        assert told[:2] == not_told[:2]
        *_, forwards, micro_batches = told
        assert set(told[3].values()) == {forwards // micro_batches} and micro_batches > 1
        assert set(not_told[3].values()) == {forwards}


def other_sizes(worker, spec):
    from lora_moe_rl.router_replay import sizes

    stock = sizes.expert_counts
    sizes.expert_counts = lambda *given: stock(*given).roll(1, dims=1)
    worker.set_adapter(random_adapter(spec))
    with pytest.raises(ReplayError) as raised:
        worker.update(*random_batch(spec))
    sizes.expert_counts = stock
    worker.set_adapter(random_adapter(spec))
    return str(raised.value), worker.update(*random_batch(spec)).metrics["replay/coverage"]


def test_sizes_of_other_routes_stop_the_step():
    config = config_of("qwen3_moe", world_size=2, ep=2)
    for said, coverage in run_ranks(config, resolve_model("qwen3_moe"), other_sizes):
        assert said.startswith("layer 0: ") and "another number of tokens" in said
        assert coverage == 1.0
