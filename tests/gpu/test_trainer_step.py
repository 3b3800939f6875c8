"""GPUs without vLLM: a trainer's steps against those of one rank of the CPU, in float32.

A step scores with replayed routes and with the router's own, makes an audited update, exports the
adapter, and saves and loads its state. Run with `make test-gpu`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import host_cuda
import numpy as np
import pytest
import tiny_families
import torch
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import with_settings
from lora_moe_rl.verify.inputs import with_teacher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

# Float32 sums in another order on another device; bfloat16 keeps 8 bits of every product.
TOLERANCE = {"float32": 1e-5 if host_cuda.here() else 1e-4, "bfloat16": 0.1}
CASES = {
    "grpo": {},
    "corrected": {"correction": "tis", "rejection": "tokens", "rejection_max": 20.0}
    | {"kl_coef": 0.1, "entropy_coef": 0.1},
    "means": {"correction": "decoupled_seq_is", "correction_normalize": True},
    "rewards": {"name": "rloo", "kl_coef": 0.1},
    "ppo": {"name": "ppo", "value_clip": 0.05},
    "dpo": {"name": "dpo"},
    "sft": {"name": "sft"},
    "distillation": {"name": "distillation", "teacher_top_k": 5, "distill_beta": 0.5},
}


def make_config(model: Path, **trainer) -> RunConfig:
    return RunConfig(model=str(model), trainer={"lr": 1e-3, "micro_batch_tokens": 60, **trainer})


def batch_of(spec, samples: int = 6):
    batch, table = random_batch(spec, samples)
    batch.groups = np.arange(samples) // 2
    batch.rewards = np.random.default_rng(3).uniform(0, 1, samples)
    return batch, table


def step(worker, spec):
    torch.backends.cuda.matmul.allow_tf32 = False
    worker.set_adapter(random_adapter(spec))
    batch, table = batch_of(spec)
    sequences = [ids.tolist() for ids in batch.token_ids]
    worker.score_ahead(sequences)
    scores = worker.score(sequences, table, True), worker.score(sequences, None, False)
    result = worker.update(batch, table)
    if worker.config.trainer.world_size == 1:  # else each would want the others' files
        with tempfile.TemporaryDirectory() as folder:
            worker.load(Path(folder), worker.save(Path(folder)).meta)
        worker.load_copy(worker.copy()[1])
    worker.memory()
    return scores, result, worker.export()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of tiny models with random weights."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3_moe", "deepseek_v3"):
        tiny_families.save(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def on_the_cpu(models):
    """What a step is there, of each model that is asked for."""
    found = {}

    def of(name: str):
        if name not in found:
            config = make_config(models / name, device="cpu")
            (found[name],) = run_ranks(config, models / name, step)
        return found[name]

    return of


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("qwen3_moe", {"dtype": "float32"}),
        ("qwen3_moe", {"dtype": "bfloat16", "offload": "both"}),
        ("deepseek_v3", {"dtype": "float32", "recompute": "full"}),
        ("deepseek_v3", {"dtype": "bfloat16"}),
        ("qwen3_moe", {"dtype": "float32", "lora_kernel": "torch"}),
        pytest.param("qwen3_moe", {"dtype": "float32", "tp": 2, "ep": 2}, marks=two_gpus),
        pytest.param("qwen3_moe", {"dtype": "float32", "pp": 2, "vpp": 2}, marks=two_gpus),
        pytest.param("deepseek_v3", {"dtype": "float32", "ep": 2}, marks=two_gpus),
        pytest.param("qwen3_moe", {"dtype": "float32", "cp": 2}, marks=two_gpus),
    ],
    ids=str,
)
def test_a_step_is_that_of_the_cpu(models, on_the_cpu, name, trainer):
    ranks = 2 if {"tp", "pp", "ep", "cp"} & trainer.keys() else 1
    config = make_config(models / name, device="cuda", world_size=ranks, **trainer)
    scores, result, shards = on_the_cpu(name)
    (_, got, _), *_ = all_ranks = run_ranks(config, models / name, step)
    got_scores = next(found for found, _, _ in all_ranks if found[0] is not None)
    tolerance = TOLERANCE[config.trainer.dtype]
    for ours, theirs in zip(got_scores, scores, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert got.version == result.version == 1
    assert got.metrics["replay/coverage"] == 1.0 and got.metrics["replay/audited"] > 0
    for key in ("loss/policy", "optim/grad_norm"):
        close = pytest.approx(result.metrics[key], rel=tolerance, abs=tolerance)
        assert got.metrics[key] == close, key
    spec = spec_of(models / name, config)
    whole = assemble(spec.tensor_shapes, [one for _, _, shards in all_ranks for one in shards])
    for key, expected in assemble(spec.tensor_shapes, shards).items():
        # Adam's first step is lr * sign(gradient): it shows the sign of every gradient.
        agree = np.isclose(whole[key], expected, rtol=0, atol=config.trainer.lr / 2).mean()
        assert agree > (0.999 if config.trainer.dtype == "float32" else 0.9), f"{key}: {agree:.3f}"


def every_case(worker, spec):
    """Losses, and gradients' norms, of an algorithm of each kind, without an audit."""
    from lora_moe_rl.trainer.critic import Critic

    engine, found = worker.engine, {}
    for name, section in CASES.items():
        config = with_settings(RunConfig(), {"algorithm": section})
        unaudited = config.replay.model_copy(update={"audit": 0})
        config = config.model_copy(update={"trainer": engine.config.trainer, "replay": unaudited})
        worker.set_adapter(random_adapter(spec))
        engine.config, engine.algorithm = config, algorithms.make(config)
        settings = engine.algorithm.critic
        engine.critic = None if settings is None else Critic(engine, settings)
        batch, table = batch_of(spec)
        if (divergence := engine.algorithm.divergence) is not None:
            batch = with_teacher(batch, divergence.top_k)
        batch.logprobs = near_rollout(worker, batch, table)
        parts = () if config.offline else (table,)
        metrics = worker.update(batch, *parts).metrics
        found[name] = {key: metrics[key] for key in ("optim/grad_norm", "policy/entropy")}
        if settings is not None:
            found[name]["critic/loss"] = metrics["critic/loss"]
        if divergence is not None:
            found[name]["loss/divergence"] = metrics["loss/divergence"]
    return found


def near_rollout(worker, batch, table):
    """Logprobs as an engine might have sampled with, so that nothing is far from them."""
    sequences, noise = [ids.tolist() for ids in batch.token_ids], np.random.default_rng(4)
    own = worker.score(sequences, table, True)
    pairs = zip(own, batch.weights, strict=True)
    return [(o[-len(w) :] + noise.uniform(-1, 1, len(w))).astype(np.float32) for o, w in pairs]


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen3_moe", "bfloat16"), ("deepseek_v3", "float32")], ids=str
)
def test_every_kind_of_algorithm_is_that_of_the_cpu(models, name, dtype):
    directory, kernel = models / name, {"lora_kernel": "torch"}
    config = make_config(directory, device="cuda", dtype=dtype, **kernel)
    (found,) = run_ranks(config, directory, every_case)
    (expected,) = run_ranks(make_config(directory, device="cpu"), directory, every_case)
    # Exponentials of differences make much of bfloat16's eight bits.
    relative = TOLERANCE["float32"] if dtype == "float32" else 0.5
    for case, values in expected.items():
        for key, value in values.items():
            close = pytest.approx(value, rel=relative, abs=relative)
            assert found[case][key] == close, (case, key)
