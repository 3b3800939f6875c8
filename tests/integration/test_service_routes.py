"""Routes that a service finds for its clients' data, on real ranks: whole, cut, in part and none,
in pieces of pipeline stages and over ranks that share tokens."""

from __future__ import annotations

import linear_loss
import numpy as np
import pytest
from ranks import random_adapter, run_ranks, spec_of
from test_service_models import MODEL, RELATIVE, close, config_of, data_of

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.router_replay.table import RouteTable
from lora_moe_rl.router_replay.travel import send
from lora_moe_rl.service.backend import LossCall
from lora_moe_rl.service.batches import batch_of
from lora_moe_rl.service.routes import RouteStore

CALL = LossCall("cross_entropy")


def store_of(config, shape, data) -> RouteStore:
    """With what was sampled: of the first datum one more token, of the second its first 5, of the
    third nothing, of the last all. Experts are drawn, so that no router would choose them."""
    rng, store = np.random.default_rng(3), RouteStore(shape, config.trainer, 10**9)
    layers = tuple(shape.moe_layers)
    for number, length in ((0, 8), (1, 5), (3, 16)):
        tokens = np.append(data[number].tokens, [1, 2, 3])[: length + 1].astype(np.int32)
        rows = np.array(
            [[rng.permutation(shape.num_experts)[: shape.top_k] for _ in layers]
             for _ in range(length)]
        )  # fmt: skip
        table = RouteTable.build([rows], [length], layers, shape.num_experts, shape.top_k)
        store.put(tokens, send(table, store.pieces), np.full(2, -1.0, np.float32))
    return store


def replayed(worker, spec, data):
    """How much was found; what a forward alone gives, and one with a backward; what routers give
    that choose for themselves; the gradient."""
    worker.of_models("create", "a", 3, {site.name: site.rank for site in spec}, 1.0)
    worker.set_adapter(random_adapter(spec))
    store = store_of(worker.config, spec.shape, data)
    found = [store.find(one.tokens) for one in data]
    routes = [one.routes for one in found]
    passes = []
    for backward in (False, True):
        batch = batch_of(data, CALL, 1)  # which is audited
        passes.append(worker.of_models("forward", "a", CALL.name, {}, backward, batch, routes))
    engine = worker.engine
    engine.adapters.gradients.whole.copy_(worker.models.of["a"].gradient)
    gradient = engine.adapters.export(of=lambda parameter: parameter.grad)
    free = worker.of_models("forward", "a", CALL.name, {}, False, batch_of(data, CALL, 2), ())
    return [one.recorded for one in found], passes, free, gradient


def of_layout(**trainer):
    config = config_of(**trainer)
    config = config.model_copy(
        update={"replay": config.replay.model_copy(update={"missing": "route", "audit": 1})}
    )
    model_dir = resolve_model(MODEL)
    spec = spec_of(model_dir, config)
    data = data_of(spec.shape.vocab_size, CALL)
    by_rank = run_ranks(config, model_dir, replayed, data)
    recorded = by_rank[0][0]
    assert recorded == [7, 5, 0, 16]
    logprobs = []
    for number in (0, 1, 2):
        together: dict = {}
        for _, passes, free, _ in by_rank:
            together |= (*passes, free)[number][0]
        logprobs.append([together[i] for i in range(len(data))])
    losses = [one["loss"] for _, one in by_rank[0][1]]
    tensors = assemble(spec.tensor_shapes, [s for *_, shards in by_rank for s in shards])
    metrics = by_rank[0][1][0][1]
    return list(zip(logprobs, [*losses, 0.0], strict=True)), tensors, metrics


@pytest.fixture(scope="module")
def alone():
    return of_layout()


def test_routes_are_replayed_with_and_without_a_backward(alone):
    (without, loss), (with_one, same), (free, _) = alone[0]
    assert loss == pytest.approx(same, rel=1e-6)
    for one, other in zip(without, with_one, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6, rtol=0)
    apart = [np.abs(one - other).max() for one, other in zip(without, free, strict=True)]
    assert min(apart[0], apart[1], apart[3]) > 1e-3, "nothing is replayed"
    assert alone[2]["replay/coverage"] == pytest.approx(28 / 38)
    assert alone[2]["replay/audited"] == 28 * 4  # layers


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, {"ep": 2}, {"pp": 2}, {"cp": 2}, {"pp": 2, "vpp": 2}],
    ids=["tp2", "dp2_ep2", "pp2", "cp2", "pp2_vpp2"],
)
def test_layouts_replay_what_one_rank_does(alone, layout):
    found, tensors, _ = of_layout(world_size=2, **layout)
    close(found[:2], alone[0][:2], RELATIVE)
    difference, key = linear_loss.worst(tensors, alone[1])
    assert difference < 2 * RELATIVE, key  # experts are drawn: some are all but closed
