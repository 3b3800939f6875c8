"""How often experts were chosen, counted on real Megatron-core ranks: against the routes that were
replayed, and where nothing is, against the router choices of Hugging Face's forward."""

from __future__ import annotations

import hf
import numpy as np
import pytest
import tiny_families
import torch
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl.config import ReplayConfig, RunConfig

LAYOUTS = {
    "one": {},
    "recompute": {"recompute": "full"},
    "tp2ep2dp2": {"world_size": 4, "tp": 2, "ep": 2},
    "pp2vpp2": {"world_size": 2, "pp": 2, "vpp": 2},
}


def make_config(folder, **trainer) -> RunConfig:
    """Small micro-batches, of uneven size: each rank has several, and under tensor parallelism
    padding. The KL wants a forward before the update, which is not to be counted."""
    return RunConfig(
        model=str(folder),
        adapter={"rank": 5, "expert_rank": 3},
        trainer={"lr": 1e-3, "micro_batch_tokens": 40, **trainer},
        algorithm={"kl_coef": 0.1},
    )


def count(worker, spec):
    """Of a step with replayed routes, of one whose routers choose, and of one with routes of the
    trainer's own."""
    batch, table = random_batch(spec)
    found = {}
    for mode in ("r3", "off", "r2"):
        worker.set_adapter(random_adapter(spec))
        worker.engine.config = worker.config.model_copy(update={"replay": ReplayConfig(mode=mode)})
        found[mode] = worker.update(batch, *([table] if mode == "r3" else [])).expert_loads
    return found


@torch.no_grad()
def by_hugging_face(folder, model) -> np.ndarray:
    """int64 [layers, experts], one sample at a time."""
    spec = spec_of(folder, make_config(folder))
    hf.merge(model, spec, random_adapter(spec))
    shape = spec.shape
    loads = np.zeros((len(shape.moe_layers), shape.num_experts), np.int64)
    for ids in random_batch(spec)[0].token_ids:
        fed = torch.from_numpy(ids[:-1].astype(np.int64))[None]
        scores = model(fed, output_router_logits=True).router_logits
        for row, of_layer in enumerate(scores):
            chosen = of_layer.topk(shape.top_k, dim=-1).indices.flatten()
            loads[row] += np.bincount(chosen.numpy(), minlength=shape.num_experts)
    return loads


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    own = by_hugging_face(folder, tiny_families.save("qwen3_moe", folder, num_hidden_layers=4))
    spec = spec_of(folder, make_config(folder))
    table = random_batch(spec)[1]
    layers = range(table.ids.shape[1])
    replayed = [np.bincount(table.ids[:, i].ravel(), minlength=table.num_experts) for i in layers]
    return folder, {"r3": np.array(replayed), "off": own, "r2": own}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_counts_once_for_each_of_its_experts_in_every_layout(expected, layout):
    folder, wanted = expected
    everyone = run_ranks(make_config(folder, **LAYOUTS[layout]), folder, count)
    for found in everyone:
        for mode, loads in wanted.items():
            np.testing.assert_array_equal(found[mode], loads, err_msg=mode)
    assert (wanted["r3"] != wanted["off"]).any()
    assert min(np.ptp(row) for row in wanted["off"]) > 0, "an expert in another's place is not seen"
