"""Ranks that were sent their own samples alone train as ranks that were sent all of them."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from ranks import random_batch, run_ranks

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.shares import shares
from lora_moe_rl.models.directory import resolve_model

MODEL = "qwen3_moe"


def train(worker, spec, shared: bool):
    """Two updates, the first of them audited."""
    from megatron.core import parallel_state as ps

    results = []
    for step in (1, 2):
        batch, table = random_batch(spec, samples=12, seed=step)
        batch.step, batch.mini_batch = step, np.repeat([0, 1], 6)
        batch.groups, batch.rewards = np.repeat([0, 1, 2, 3], 3), np.linspace(-1, 1, 12)
        if shared:
            of_ranks = pickle.loads(pickle.dumps(shares(batch, worker.config)))
            batch = of_ranks[ps.get_data_parallel_rank()]
        results.append(worker.update(batch, table))
    return results, worker.export()


CLIP_COV = {"loss": "clip_cov", "clip_cov_lb": 0.0, "clip_cov_ratio": 0.2}


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "grpo"}, {"name": "ppo"}, {"name": "grpo", **CLIP_COV}],
    ids=["grpo", "ppo", "clip_cov"],
)
def test_a_share_trains_as_the_whole(algorithm):
    config = RunConfig.model_validate({
        "model": MODEL,
        "trainer": {"lr": 1e-3, "micro_batch_tokens": 40, "world_size": 2, "ep": 2},
        "algorithm": {**algorithm, "mini_batches": 2, "prompts_per_step": 4},
        "logging": {"tokens": True},
    })  # fmt: skip
    model = resolve_model(MODEL)
    both = [run_ranks(config, model, train, shared) for shared in (False, True)]
    if "loss" in algorithm:
        assert 0.1 < both[0][0][0][0].metrics["loss/selected"] <= 0.2
    for (whole, shards), (share, others) in zip(*both, strict=True):
        for one, other in zip(whole, share, strict=True):
            assert one.metrics == pytest.approx(other.metrics, rel=0, abs=0, nan_ok=True)
            assert one.tokens.keys() == other.tokens.keys() and one.tokens
            for sample, values in one.tokens.items():
                np.testing.assert_array_equal(values.logprobs, other.tokens[sample].logprobs)
        for one, other in zip(shards, others, strict=True):
            np.testing.assert_array_equal(one.data, other.data)
