"""Scores that are begun before an engine's routes are known: what comes of them is, to the bit,
what a forward on the engine's routes gives, and it is taken only where the engine took the same.
Where it wrote a token's experts in another order, the forward sums them in that order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ranks import random_adapter, random_batch, run_ranks
from test_replay import make_config, model  # noqa: F401  a fixture

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.trainer.ahead import PAUSE

LAYOUTS = {
    "one": {},
    "pp2": {"world_size": 2, "pp": 2},
    "tp2": {"world_size": 2, "tp": 2},
    "ep2": {"world_size": 2, "ep": 2},
    "cp2": {"world_size": 2, "cp": 2},
}


@pytest.fixture(scope="module")
def routes(model):  # noqa: F811
    """The routes that the trainer's routers choose, with the adapter of the tests."""
    (table,) = run_ranks(make_config(model), model, choose)
    return table


def choose(worker, spec) -> RouteTable:
    worker.set_adapter(random_adapter(spec))
    rows = []
    for ids in sequences_of(spec):
        batch = TrainBatch.from_sequences([ids])
        with worker.engine.watched_replay(batch, None):
            works = worker.engine.my_work(batch, range(1), None, 1, 0)
            worker.engine.forward(works, "own", 1.0, record=True)
        ((work,), fed) = works, len(ids) - 1
        rows.append(np.stack([work.recorded[n][:fed].numpy() for n in spec.shape.moe_layers], 1))
    shape, fed = spec.shape, [len(one) for one in rows]
    return RouteTable.build(rows, fed, shape.moe_layers, shape.num_experts, shape.top_k)


def sequences_of(spec) -> list[list[int]]:
    return [ids.tolist() for ids in random_batch(spec)[0].token_ids]


def ask(worker, spec, table: RouteTable):
    """{what was asked: (forwards spared by it, how far it is from what a plain forward gives)}."""
    worker.set_adapter(random_adapter(spec))
    sequences, found = sequences_of(spec), {}
    missing = replace(table, ids=table.ids.copy(), valid=table.valid.copy())
    missing.valid[3] = False
    missing.ids[3] = 0

    def asked(name: str, table: RouteTable | None, sequences=sequences) -> None:
        batch = TrainBatch.from_sequences(sequences)
        plain = worker.engine.score(batch, *(() if table is None else (table,)))
        before = worker.ahead.spared
        given = worker.score(sequences, table, True)
        found[name] = worker.ahead.spared - before, _distance(given, plain)

    worker.score_ahead(sequences)
    asked("the same", table)
    asked("again, for another engine", table)
    asked("in another order", replace(table, ids=table.ids[..., ::-1].copy()))
    asked("its own", None)
    asked("one missing", missing)
    asked("other sequences", None, sequences[::-1])
    worker.set_adapter(random_adapter(spec, seed=3))
    asked("another adapter", None)
    worker.score_ahead(sequences)
    worker.engine.version += 1
    asked("another version", None)
    return found


def _distance(given, plain) -> float:
    if plain is None:
        return 0.0 if given is None else np.inf
    return max(float(np.abs(a - b).max()) for a, b in zip(given, plain, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_begun_is_taken_only_for_what_it_is(model, routes, layout):  # noqa: F811
    config = make_config(model, {"missing": "mask"}, **LAYOUTS[layout])
    for found in run_ranks(config, model, ask, routes):
        assert all(far < 2e-6 for _, far in found.values()), found
        spared = {name: times for name, (times, _) in found.items()}
        assert spared == {
            "the same": 1,
            "again, for another engine": 1,
            "in another order": 1,
            "its own": 1,
            "one missing": 1,
            "other sequences": 0,
            "another adapter": 0,
            "another version": 0,
        }


def ask_for_another(worker, spec, table: RouteTable):
    """One token of one layer goes elsewhere: on the ranks that hold it, and so on all."""
    worker.set_adapter(random_adapter(spec))
    sequences = sequences_of(spec)
    other = replace(table, ids=table.ids.copy())
    free = np.setdiff1d(np.arange(spec.shape.num_experts), other.ids[7, -1])
    other.ids[7, -1, 0] = free[0]
    batch = TrainBatch.from_sequences(sequences)
    own, plain = worker.engine.score(batch, table), worker.engine.score(batch, other)
    worker.score_ahead(sequences)
    given, spared = worker.score(sequences, other, True), []
    for _ in range(PAUSE + 2):
        worker.score_ahead(sequences)
        before = worker.ahead.spared
        worker.score(sequences, table, True)
        spared.append(worker.ahead.spared - before)
    return _distance(given, plain), _distance(own, plain), spared


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_other_route_takes_a_forward_of_its_own(model, routes, layout):  # noqa: F811
    config = make_config(model, **LAYOUTS[layout])
    found = run_ranks(config, model, ask_for_another, routes)
    assert max(matters for _, matters, _ in found) > 1e-5
    for distance, _, spared in found:
        assert distance == 0
        assert spared == [0] * PAUSE + [1, 1]
