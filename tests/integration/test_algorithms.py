"""Every preset's loss and gradient through the real trainer: micro-batches, data-parallel ranks and
layouts change nothing. That the formulas are right is shown in tests/unit/algorithms."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl import algorithms
from lora_moe_rl.adapters.shards import assemble
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import ALGORITHMS
from lora_moe_rl.models.directory import resolve_model

MODEL = "qwen3_moe"
AT_ROLLOUT = {"anchor": "rollout"}  # so that ratios are not all 1
TIGHT = {"rejection_max": 1.1}
WIDE = {"rejection_max": 2.0}
CASES = {name: {"name": name, **AT_ROLLOUT} for name in ALGORITHMS.names()} | {
    "kl": {"kl_coef": 0.1, "kl_estimator": "k3+"},
    "tis": {"correction": "tis"},
    "mis": {"correction": "mis", "correction_max": 30.0},
    "geometric": {"rejection": "sequence_mean", **TIGHT, "aggregation": "seq-mean-token-mean"},
    "token": {"rejection": "tokens", **WIDE},
    "prompts": {"rejection": "tokens", **WIDE, "aggregation": "prompt-mean"},
    "reinforce": {"correction": "bypass_pg_is", "aggregation": "seq-mean-token-sum"},
}


def config_of(algorithm=None, **trainer) -> RunConfig:
    return RunConfig(
        model=MODEL,
        algorithm=algorithm or {},
        trainer={"lr": 1e-3, "micro_batch_tokens": 4096, **trainer},
    )


def near_rollout(worker, spec):
    """Logprobs as an engine might have sampled with: the trainer's, up to a factor of e off."""
    batch, table = random_batch(spec)
    worker.set_adapter(random_adapter(spec))
    own = worker.score([ids.tolist() for ids in batch.token_ids], table, True)
    rng = np.random.default_rng(3)
    responses = [o[-len(w) :] for o, w in zip(own, batch.weights, strict=True)]
    return [(o + rng.uniform(-1, 1, len(o))).astype(np.float32) for o in responses]


def every_case(worker, spec, trainer, rollout):
    """(loss, gradient norm, gradient shards) of each case, from the same adapter."""
    batch, table = random_batch(spec)
    batch.groups = np.arange(len(batch.token_ids)) // 3
    batch.logprobs = rollout
    worker.set_adapter(random_adapter(spec))
    found = {}
    for name, algorithm in CASES.items():
        worker.engine.config = config_of(algorithm, **trainer)
        worker.engine.algorithm = algorithms.make(worker.engine.config)
        loss, norm, shards = worker.gradients(batch, table)
        found[name] = (loss, norm, shards)
    return found


def whole(found: list, spec, case: str) -> tuple[float, dict[str, np.ndarray]]:
    shards = [shard for rank in found for shard in rank[case][2]]
    return found[0][case][0], assemble(spec.tensor_shapes, shards)


LAYOUTS = {
    "micro_batches": {"micro_batch_tokens": 30},
    "dp2": {"world_size": 2, "micro_batch_tokens": 40},
    "tp2": {"world_size": 2, "tp": 2},
    "pp2": {"world_size": 2, "pp": 2, "micro_batch_tokens": 60},
}


@pytest.fixture(scope="module")
def model():
    return resolve_model(MODEL)


@pytest.fixture(scope="module")
def rollout(model):
    return run_ranks(config_of(), model, near_rollout)[0]


@pytest.fixture(scope="module")
def one_rank(model, rollout):
    return run_ranks(config_of(), model, every_case, {}, rollout)


@pytest.mark.parametrize(
    "layout",
    [
        "micro_batches",
        "dp2",
        pytest.param("tp2", marks=pytest.mark.slow),
        pytest.param("pp2", marks=pytest.mark.slow),
    ],
)
def test_the_layout_changes_no_algorithm(model, one_rank, rollout, layout):
    spec, trainer = spec_of(model, config_of()), LAYOUTS[layout]
    found = run_ranks(config_of(**trainer), model, every_case, trainer, rollout)
    for case in CASES:
        loss, gradient = whole(found, spec, case)
        expected, reference = whole(one_rank, spec, case)
        assert loss == pytest.approx(expected, rel=1e-5), case
        top = max(np.abs(value).max() for value in reference.values())
        assert top > 1e-6, case
        for name, value in gradient.items():
            assert np.abs(value - reference[name]).max() < 1e-5 * top, (case, name)


def test_the_cases_are_not_one_function(model, one_rank):
    losses = [rank[0] for rank in one_rank[0].values()]
    assert len({round(loss, 6) for loss in losses}) >= len(CASES) - 4  # some presets share a loss
