"""What an update reports does not depend on the layout: real Megatron-core ranks over gloo.

That the function, its gradients and its checkpoints do not is for `test_verify_layout.py`.
"""

from __future__ import annotations

import linear_loss
import numpy as np
import pytest
import tiny_families
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch

LAYOUTS = {
    "tp2ep2dp2": {"world_size": 4, "tp": 2, "ep": 2},
    "pp2vpp2": {"world_size": 2, "pp": 2, "vpp": 2},
    "cp2tp2ep4": {"world_size": 4, "cp": 2, "tp": 2, "ep": 4},
}


def make_config(folder, **trainer) -> RunConfig:
    """Small micro-batches, so that every rank has several of uneven size."""
    return RunConfig(
        model=str(folder),
        adapter={"rank": 5, "expert_rank": 3},
        trainer={"lr": 1e-3, "micro_batch_tokens": 40, "clip_grad": 0.1, **trainer},
        algorithm={"kl_coef": 0.1},
    )


def train(worker, spec):
    worker.set_adapter(random_adapter(spec))
    return [worker.update(*random_batch(spec)).metrics for _ in range(2)]


def test_metrics_do_not_depend_on_the_layout(tmp_path):
    tiny_families.save("deepseek_v3", tmp_path, num_hidden_layers=4)
    (expected,) = run_ranks(make_config(tmp_path), tmp_path, train)
    for name, layout in LAYOUTS.items():
        everyone = run_ranks(make_config(tmp_path, **layout), tmp_path, train)
        assert all(metrics == everyone[0] for metrics in everyone)
        for got, one in zip(everyone[0], expected, strict=True):
            assert got == pytest.approx(one, rel=1e-4, abs=1e-5), name
            assert one["replay/coverage"] == 1 and one["loss/kl"] > 1e-4


def train_in_mini_batches(worker, spec, algorithm):
    """Two optimizer steps, the first on the longer samples; what the routers chose in the forward
    before them is replayed."""
    worker.set_adapter(random_adapter(spec))
    batch, routes = random_batch(spec)
    lengths = batch.lengths()
    batch.mini_batch = (lengths <= np.median(lengths)).astype(np.int64)
    return worker.update(batch, *() if algorithm["mode"] == "r2" else (routes,)).metrics


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_metrics_of_several_mini_batches_do_not_depend_on_the_layout(mode, tmp_path):
    """Also where micro-batches have to be equally long, or are padded for ranks to share them."""
    tiny_families.save("deepseek_v3", tmp_path, num_hidden_layers=4)

    def metrics(layout):
        config = make_config(tmp_path, **layout)
        algorithm = config.algorithm.model_copy(update={"mini_batches": 2})
        replay = config.replay.model_copy(update={"mode": mode})
        config = config.model_copy(update={"algorithm": algorithm, "replay": replay})
        return run_ranks(config, tmp_path, train_in_mini_batches, {"mode": mode})

    (expected,) = metrics({})
    assert expected["replay/disagreement"] > 0
    for name, layout in LAYOUTS.items():
        assert metrics(layout)[0] == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def of_few_tokens(worker, spec):
    """(loss, this rank's part of the gradient): most samples have one token fed."""
    worker.set_adapter(random_adapter(spec))
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, spec.shape.vocab_size, n).astype(np.int32) for n in (2, 2, 9, 3, 2)]
    batch = TrainBatch.from_sequences(ids, np.array([1, 1, 3, 1, 1]), step=1)
    batch.advantages = [np.full(len(w), a, np.float32) for a, w in enumerate(batch.weights, 1)]
    batch.logprobs = [rng.normal(-5, 1, len(w)).astype(np.float32) for w in batch.weights]
    loss, _, shards = worker.gradients(batch)
    return loss, shards


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_moe", {"world_size": 4, "cp": 4}),
        ("deepseek_v3", {"world_size": 4, "cp": 2, "tp": 2}),
    ],
)
def test_micro_batches_of_fewer_tokens_than_ranks_are_exact(family, layout, tmp_path):
    """Of four ranks, where most micro-batches have one token or two: some have padding alone."""
    tiny_families.save(family, tmp_path)
    found = []
    for trainer in ({}, layout):
        config = make_config(tmp_path, micro_batch_tokens=2, **trainer)
        ranks = run_ranks(config, tmp_path, of_few_tokens)
        shards = [shard for _, of_rank in ranks for shard in of_rank]
        found.append((ranks[0][0], assemble(spec_of(tmp_path, config).tensor_shapes, shards)))
    (loss, one), (here, many) = found
    assert here == pytest.approx(loss, rel=1e-5)
    difference, name = linear_loss.worst(many, one)
    assert difference < 1e-5, name


RATES = {"lr_ratio_B": 4.0, "lr_pattern": {"experts.*": 0.5, "k_proj": 0.0}}


def train_and_export(worker, spec):
    worker.set_adapter(random_adapter(spec))
    for _ in range(2):
        worker.update(*random_batch(spec))
    return worker.export()


def trained(folder, **trainer) -> dict[str, np.ndarray]:
    config = make_config(folder, **trainer)
    shards = [part for rank in run_ranks(config, folder, train_and_export) for part in rank]
    return assemble(spec_of(folder, config).tensor_shapes, shards)


def test_learning_rates_of_their_own_do_not_depend_on_the_layout(tmp_path):
    """LoRA+'s ratio, and factors by module, on ranks that hold parts of what is fused."""
    tiny_families.save("qwen3_moe", tmp_path)
    spec = spec_of(tmp_path, make_config(tmp_path))
    start, plain = random_adapter(spec), trained(tmp_path)
    one = trained(tmp_path, **RATES)
    many = trained(tmp_path, **RATES, **LAYOUTS["tp2ep2dp2"])
    for name, value in one.items():
        # Adam moves each element by about the rate: where a gradient is near 0, rounding decides.
        moved = np.abs(value - start[name]).max()
        far = np.abs(many[name] - value) > 1e-4
        assert far.mean() < 1e-3, (name, far.mean())
        if "k_proj" in name:
            assert moved == 0, name
        else:
            wanted = np.abs(plain[name] - start[name]).max() * (4 if name.endswith("B") else 1)
            wanted *= 0.5 if ".experts." in name else 1
            assert moved == pytest.approx(wanted, rel=0.05), name
