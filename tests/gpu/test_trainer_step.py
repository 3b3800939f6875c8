"""One GPU without vLLM: a trainer step against the CPU float32 reference.

A step is a forward with replayed routes, backward, optimizer, and the export of the adapter.
Run with `make test-gpu`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_families
import torch
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Float32 sums in another order on another device; bfloat16 keeps 8 bits of every product.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}


def make_config(model: Path, **trainer) -> RunConfig:
    return RunConfig(model=str(model), trainer={"lr": 1e-3, "micro_batch_tokens": 60, **trainer})


def train(worker, spec):
    torch.backends.cuda.matmul.allow_tf32 = False
    worker.set_adapter(random_adapter(spec))
    batch, table = random_batch(spec)
    sequences = [ids.tolist() for ids in batch.token_ids]
    scores = worker.score(sequences, table, True)
    result = worker.update(batch, table)
    return scores, result, worker.export()


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def reference(request, tmp_path_factory):
    """A tiny model with random weights, and what a step of it is on the CPU."""
    model = tmp_path_factory.mktemp(request.param)
    tiny_families.save(request.param, model)
    return model, run_ranks(make_config(model, device="cpu"), model, train)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_equals_the_cpu_float32_reference(reference, dtype):
    model, (scores, result, shards) = reference
    config = make_config(model, device="cuda", dtype=dtype)
    got_scores, got, got_shards = run_ranks(config, model, train)[0]
    tolerance = TOLERANCE[dtype]
    for ours, expected in zip(got_scores, scores, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance)
    assert got.version == result.version == 1
    assert got.metrics["replay/coverage"] == 1.0
    for name in ("loss/policy", "optim/grad_norm"):
        assert got.metrics[name] == pytest.approx(
            result.metrics[name], rel=tolerance, abs=tolerance
        ), name
    spec = spec_of(model, config)
    whole = assemble(spec.tensor_shapes, got_shards)
    for name, expected in assemble(spec.tensor_shapes, shards).items():
        # Adam's first step is lr * sign(gradient): it shows the sign of every gradient.
        agree = np.isclose(whole[name], expected, rtol=0, atol=config.trainer.lr / 2).mean()
        assert agree > (0.999 if dtype == "float32" else 0.9), f"{name}: {agree:.3f}"
