"""Replay in real Megatron-core ranks: what is used is what was recorded, and anything else is
noticed. A deep enough DeepSeek-V3 shape: a dense layer first, grouped routing, three MoE layers."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import ray
import tiny_families
from ranks import random_adapter, random_batch, run_ranks

from lora_moe_rl.config import ReplayConfig, RunConfig
from lora_moe_rl.errors import ReplayError
from lora_moe_rl.rollout.outputs import route_pieces
from lora_moe_rl.router_replay.table import RouteTable, token_sum
from lora_moe_rl.router_replay.travel import send

ALL = 10**6
TOP_K, BITS = 3, 3  # of the model's 8 experts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek_v3")
    tiny_families.save("deepseek_v3", folder, num_hidden_layers=4)
    return folder


def make_config(folder, replay=(), **trainer) -> RunConfig:
    return RunConfig(
        model=str(folder),
        adapter={"rank": 5, "expert_rank": 3},
        trainer={"lr": 1e-3, "micro_batch_tokens": 40, **trainer},
        replay={"audit": 1, "audit_samples": ALL, **dict(replay)},
        algorithm={"kl_coef": 0.1},
    )


def step_and_gradients(worker, spec):
    """Routes as an engine would send them to this layout, in small blocks."""
    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    sent = send(table, route_pieces(spec.shape, worker.config.trainer), block_bytes=100)
    loss, norm, _ = worker.gradients(batch, sent)
    metrics = worker.update(batch, sent).metrics
    for mode in ("r2", "off"):
        worker.set_adapter(random_adapter(spec))
        worker.engine.config = worker.config.model_copy(update={"replay": ReplayConfig(mode=mode)})
        own = worker.update(batch).metrics
        metrics |= {f"{mode} {name}": own[name] for name in ("loss/policy", "optim/grad_norm")}
    worker.engine.config = worker.config
    return loss, norm, metrics, bytes_received(worker, spec)


def bytes_received(worker, spec) -> tuple[int, list[int]]:
    """By this rank of long samples, each a block of its own; and the MoE layers of its chunks."""
    from megatron.core import parallel_state as ps

    batch, table = random_batch(spec, samples=8, lengths=(3000, 3001))
    pieces = route_pieces(spec.shape, worker.config.trainer)
    routes = worker.engine.routes(batch, (send(table, pieces, block_bytes=1),))
    dp = ps.get_data_parallel_world_size(), ps.get_data_parallel_rank()
    worker.engine.my_work(batch, range(8), routes, *dp)
    return routes.bytes, [len(layers) for layers in routes.chunks]


@pytest.fixture(scope="module")
def one_rank(model):
    return run_ranks(make_config(model), model, step_and_gradients)[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"recompute": "full"},
        {"recompute": "full", "world_size": 2, "pp": 2},
        {"recompute": "full", "world_size": 2, "pp": 2, "vpp": 2},
        {"world_size": 2, "tp": 2},
        {"world_size": 2, "ep": 2},
        {"recompute": "full", "world_size": 2, "cp": 2},
    ],
    ids=["recompute", "recompute-pp2", "recompute-vpp2", "tp2", "ep2", "recompute-cp2"],
)
def test_every_route_is_used_in_every_layout(model, one_rank, layout):
    loss, norm, expected, *_ = one_rank
    everyone = run_ranks(make_config(model, **layout), model, step_and_gradients)
    got_loss, got_norm, got, *_ = everyone[0]
    assert (got_loss, got_norm) == pytest.approx((loss, norm), rel=1e-4)
    # A chunk's routers compare their map once in the forward of training and once more in backward;
    # the reference's routes are its own.
    times = 2 if "recompute" in layout else 1
    rows = sum(len(ids) - 1 for ids in random_rows(model))
    assert got["replay/audited"] == rows * 3 * times
    for *_, (received, chunks) in everyone:
        row_bytes = sum(-(-layers * TOP_K * BITS // 8) for layers in chunks)
        samples = 4 if layout.get("ep") == 2 else 8
        assert received == pytest.approx(samples * 2999 * row_bytes, rel=0.03)
    for name in set(expected) - {"replay/audited", "replay/bytes"}:
        assert got[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def random_rows(model):
    from ranks import spec_of

    return random_batch(spec_of(model, make_config(model)))[0].token_ids


def faults(worker, spec):
    """Ways in which replay went wrong in other systems, each put into ours."""
    from lora_moe_rl.router_replay.layer import LayerReplay

    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    engine = worker.engine
    found = {}

    def attempt(name, **against):
        before = worker.version()
        engine.audit.against = dataclasses.replace(table, **against) if against else None
        with pytest.raises(ReplayError) as raised:
            worker.update(batch, table)
        engine.audit.against = None
        found[name] = str(raised.value)
        assert worker.version() == before

    attempt("layer", ids=np.roll(table.ids, 1, axis=1))
    attempt("token", ids=np.roll(table.ids, 1, axis=0))
    one = table.ids.copy()
    row = int(table.offsets[4]) + 2
    one[row, 1, 0] = next(e for e in range(table.num_experts) if e not in one[row, 1])
    attempt("expert", ids=one)

    install = engine.replay.install
    engine.replay.install = lambda chunk, routes, *rest: install(
        chunk, dataclasses.replace(routes, pieces=(np.roll(routes.rows(), 1, axis=0),)), *rest
    )
    attempt("installed one token late")
    engine.replay.install = install

    choose = LayerReplay._choose
    LayerReplay._choose = lambda self, own: own
    attempt("anew")
    LayerReplay._choose = choose

    layer = next(iter(engine.replay.layers.values()))
    layer.instance.get_replay_topk = layer.upstream
    layer.instance.clear_router_replay_action()
    attempt("bypass")
    layer.instance.get_replay_topk = layer.topk

    short = RouteTable.build(
        [table.ids[:5]], [5], table.layers, table.num_experts, table.ids.shape[2]
    )
    with pytest.raises(ReplayError, match="routes of 1 samples and 5 tokens"):
        worker.update(batch, short)
    with pytest.raises(ReplayError, match="the model has"):
        worker.update(batch, dataclasses.replace(table, layers=(0, 1, 2)))
    with pytest.raises(ReplayError, match="came without routes"):
        worker.update(batch)
    sent, other = send(table), send(short)
    mixed = dataclasses.replace(sent.blocks[0], parts=other.blocks[0].parts)
    with pytest.raises(ReplayError, match="a block that was sent as samples of"):
        worker.update(batch, dataclasses.replace(sent, blocks=(mixed,)))
    sent.blocks[0].parts[0][-3] ^= 1
    with pytest.raises(ReplayError, match="are corrupt") as raised:
        worker.update(batch, sent)
    found["corrupt"] = str(raised.value)

    cleared = all(
        x.target is None and not x.waiting and x.instance.target_topk_idx is None
        and x.instance.router_replay_action is None
        for x in engine.replay.layers.values()
    )  # fmt: skip
    audited = worker.update(batch, table).metrics["replay/audited"]
    return found, cleared, audited, (row - int(table.offsets[4]), one[row, 1], table.ids[row, 1])


def test_a_fault_of_any_kind_stops_the_step_and_is_named(model):
    found, cleared, audited, (token, expected, used) = run_ranks(make_config(model), model, faults)[
        0
    ]
    for name in ("layer", "token", "installed one token late", "anew"):
        assert "token 0 of sample" in found[name] and "in layer 1:" in found[name], name
    assert found["expert"].startswith(
        f"token {token} of sample 4 was not routed as recorded in layer 2: expected experts "
        f"{sorted(expected.tolist())}, used {sorted(used.tolist())} (1 of the "
    )
    assert "layer 1: its router consulted replay 0 times" in found["bypass"] or (
        "token 0 of sample" in found["bypass"]
    )
    assert found["corrupt"].startswith("sample 10: routes of layers 1 to 3 are corrupt")
    assert cleared and audited > 0


def exchanged(worker, spec):
    """Two equally long samples, with their own routes and with each other's."""
    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec, samples=2, lengths=(20, 21))
    sums = np.array([token_sum(batch.fed(sample)) for sample in (0, 1)], np.uint64)
    bound = dataclasses.replace(table, token_sums=sums)
    pieces = route_pieces(spec.shape, worker.config.trainer)
    sent = send(bound, pieces, block_bytes=1)
    one, other = sent.blocks
    blocks = (
        dataclasses.replace(one, parts=other.parts),
        dataclasses.replace(other, parts=one.parts),
    )
    before = worker.version()
    with pytest.raises(ReplayError) as raised:
        worker.update(batch, dataclasses.replace(sent, blocks=blocks))
    assert worker.version() == before
    return str(raised.value), worker.update(batch, sent).metrics["replay/audited"]


@pytest.mark.parametrize("layout", [{}, {"world_size": 2, "pp": 2}], ids=["alone", "pp2"])
def test_routes_of_equally_long_samples_that_were_exchanged_stop_the_step(model, layout):
    for told, audited in run_ranks(make_config(model, **layout), model, exchanged):
        assert told.startswith("sample 0: its routes are those of other tokens") and audited > 0


def test_only_references_pass_through_the_controller(ray_session):
    class Recorder:
        """In place of an engine."""

        def record(self):
            rows = np.tile(np.arange(8, dtype=np.uint8), (5000, 4, 1))
            table = RouteTable.build([rows] * 3, [5000] * 3, (1, 2, 3, 4), 8, 8)
            return send(table, [(1, 2), (3, 4)], ray.put)

    actor = ray.remote(num_cpus=0)(Recorder).remote()
    sent = ray.get(actor.record.remote())
    assert len(pickle.dumps(sent)) < 5000 < sent.num_rows
    table = sent.table()
    assert table.layers == (1, 2, 3, 4) and (table.ids == np.arange(8)).all()
    ray.kill(actor)


def spread_of_padding(worker, spec):
    from lora_moe_rl.kernels.route_codec import RowLayout, naive
    from lora_moe_rl.router_replay.routes import _spread

    layout = RowLayout(1, 3, 8)
    return [naive.unpack(_spread(n, layout), layout)[:, 0].tolist() for n in (1, 5, 16)]


def test_padding_goes_to_all_experts_equally_often(model):
    for rows in run_ranks(make_config(model), model, spread_of_padding)[0]:
        assert all(len(set(row)) == 3 for row in rows)
        loads = np.bincount(np.ravel(rows), minlength=8)
        assert loads.max() - loads.min() <= 1


def missing_and_compared(worker, spec):
    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    valid = table.valid.copy()
    valid[[3, 9], 1] = False
    ids = np.where(valid[..., None], table.ids, 0)  # what stands there must not matter
    holes = dataclasses.replace(table, valid=valid, ids=ids)
    results = {}
    for name, step in (("due", 3), ("between", 4)):
        results[name] = worker.update(dataclasses.replace(batch, step=step), holes).metrics
    return results, [bool(x) for x in batch_mask(batch)[[3, 9]]]


def batch_mask(batch) -> np.ndarray:
    """Whether the row's token predicts a response token."""
    rows = [np.arange(len(i) - 1) >= p - 1 for i, p in zip(batch.token_ids, batch.prompt_lengths)]
    return np.concatenate(rows)


def test_missing_routes_are_counted_masked_and_compared_on_the_last_stage_too(model):
    """The missing rows are in layer 2, on the first of two stages."""
    replay = {"missing": "mask", "compare_every": 2, "audit": 2}
    config = make_config(model, replay, world_size=2, pp=2)
    results, in_loss = run_ranks(config, model, missing_and_compared)[0]
    due, between = results["due"], results["between"]
    assert due["replay/missing_tokens"] == 2
    assert due["replay/masked_tokens"] == sum(in_loss) > 0
    assert due["replay/coverage"] < 1
    assert due["replay/audited"] > 0 and "replay/audited" not in between
    names = ("kl", "mean_abs_logprob_diff", "max_abs_logprob_diff", "off_by_2x")
    for name in names:
        assert f"mismatch/without_replay/{name}" not in between
        # The routes are random ones: without them the trainer is another function.
        assert due[f"mismatch/without_replay/{name}"] != due[f"mismatch/{name}"]
    layers = [due[f"replay/disagreement/layer_0{i}"] for i in (1, 2, 3)]
    assert "replay/disagreement/layer_00" not in due
    assert len(set(layers)) == 3
    assert due["replay/disagreement"] == pytest.approx(np.mean(layers), rel=1e-2)


def two_models(worker, spec):
    """A policy and a reference in one process, one between the other's forward and update."""
    from lora_moe_rl.trainer.engine import TrainingEngine

    batch, table = random_batch(spec)
    sequences = [ids.tolist() for ids in batch.token_ids]
    other_batch, other_table = random_batch(spec, seed=5)
    worker.set_adapter(random_adapter(spec))
    policy = worker.score(sequences, table, True)
    reference = TrainingEngine(worker.config, spec, worker.model_dir, worker.engine.device)
    first = reference.score(other_batch, other_table)
    with worker.engine.watched_replay(batch, None):
        works = worker.engine.my_work(batch, range(3), worker.engine.routes(batch, (table,)), 1, 0)
        worker.engine.forward(works, "score", 1.0)
        second = reference.score(other_batch, other_table)
        worker.engine.forward(works, "again", 1.0)
    same = all((w.known["score"] == w.known["again"]).all() for w in works)
    after = worker.score(sequences, table, True)
    return same, [
        max(float(np.abs(a - b).max()) for a, b in zip(x, y, strict=True))
        for x, y in ((first, second), (policy, after))
    ]


def test_two_models_in_one_process_are_kept_apart(model):
    same, differences = run_ranks(make_config(model), model, two_models)[0]
    assert same and differences == [0, 0]
