"""Several optimizer steps of one rollout, each of its own samples: the adapter that comes of them,
and what is told of them, depend on no micro-batches and no ranks. That one step's gradient is right
is shown in test_algorithms.py."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig
from lora_moe_rl.models.directory import resolve_model
from lora_moe_rl.verify.algorithm_jobs import Inputs, near_rollout

MODEL = "qwen3_moe"
# An epsilon that is not small: Adam's steps are then as near each other as the gradients are.
TRAINER = {"lr": 1e-2, "adam_eps": 1e-2, "dtype": "float32", "device": "cpu"}
UPDATES = {"epochs": 2, "mini_batches": 3, "prompts_per_step": 6}
CASES = {
    "by token": {"clip_low": 0.01, "clip_high": 0.01, "kl_coef": 0.1, "entropy_coef": 0.01},
    "by sample": {"name": "gspo", "correction": "decoupled_seq_is", "rejection": "veto"},
    "by prompt": {"aggregation": "prompt-mean", "rejection": "tokens", "correction": "icepop"},
    "drawn again": {"name": "dr_grpo", "anchor": "rollout", "reweight": "pow"},
    "with a critic": {"name": "ppo", "gamma": 0.9, "lambda_policy": 0.8, "value_clip": 0.05},
}
QUICK = "by token"
LAYOUTS = (
    {"micro_batch_tokens": 1 << 16},
    {"micro_batch_tokens": 40},
    {"micro_batch_tokens": 60, "world_size": 2, "ep": 2},
)
TOLD = ("loss/", "policy/", "critic/", "optim/grad_norm", "mismatch/kl")


def config_of(algorithm: dict, **trainer) -> RunConfig:
    sections = {"model": MODEL, "trainer": TRAINER | trainer, "algorithm": algorithm | UPDATES}
    return RunConfig.model_validate(sections)


def samples_of(spec):
    """18 samples of 6 prompts, of unequal lengths, with tokens of tools between the policy's; one
    of them is not in the loss."""
    batch, table = random_batch(spec, samples=18, seed=4, lengths=(8, 29))
    rng = np.random.default_rng(9)
    batch.masks = [rng.random(len(one)) > 0.3 for one in batch.weights]
    for mask in batch.masks:
        mask[-1] = True
    batch.weights = [mask.astype(np.float32) for mask in batch.masks]
    batch.weights[5] *= 0
    batch.groups = np.repeat(np.arange(6), 3)
    batch.mini_batch = batch.groups // 2
    batch.rewards = rng.integers(0, 3, 18).astype(np.float64)
    return batch, table


def sampled(worker, spec):
    return near_rollout(worker, spec, Inputs(*samples_of(spec), {}))


def train(worker, spec, rollout, several):
    batch, table = samples_of(spec)
    batch.logprobs = [one * mask for one, mask in zip(rollout, batch.masks, strict=True)]
    if several:
        batch.copies = np.random.default_rng(2).integers(0, 3, len(batch))
    worker.set_adapter(random_adapter(spec))
    result = worker.update(batch, table)
    return result, worker.export()


@pytest.fixture(scope="module")
def rollout():
    (logprobs,) = run_ranks(config_of({}), resolve_model(MODEL), sampled)
    return logprobs


@pytest.mark.parametrize(
    "name",
    [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_micro_batches_and_ranks_change_nothing(name, rollout):
    """What moves by 1 is the same to 1e-4: six steps of Adam in float32."""
    model, algorithm = resolve_model(MODEL), CASES[name]
    shapes, several = spec_of(model, config_of({})).tensor_shapes, "reweight" in algorithm
    found = []
    for layout in LAYOUTS:
        ranks = run_ranks(config_of(algorithm, **layout), model, train, rollout, several)
        result = ranks[0][0]
        assert (result.version, result.skipped) == (6, 0)
        found.append((result.metrics, assemble(shapes, [s for _, own in ranks for s in own])))
    (metrics, tensors), *others = found
    start = random_adapter(spec_of(model, config_of({})))
    for told, other in others:
        for key, whole in tensors.items():
            moved = np.abs(whole - start[key]).max()
            assert moved > 0 and np.abs(other[key] - whole).max() < 1e-4 * moved, key
        for key in (key for key in metrics if key.startswith(TOLD)):
            assert told[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-5, nan_ok=True), key
