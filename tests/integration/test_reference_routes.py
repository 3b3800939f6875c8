"""What a policy is measured against routes by itself: with routes replayed, the KL is to the base
and to the start as Hugging Face's model has them, whose routers choose."""

from __future__ import annotations

import dataclasses

import hf
import numpy as np
import pytest
from ranks import random_adapter, random_batch, run_ranks, spec_of

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.models.directory import resolve_model

TOLERANCE = 1e-5
LAYOUTS = {"qwen3_moe": {}, "deepseek_v3": {"world_size": 2, "ep": 2, "recompute": "full"}}
CASES = {
    "base": {"kl_coef": 0.1},
    "start": {"kl_coef": 0.1, "reference": "start"},
    "in the reward": {"name": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k3"},
}


def start_of(spec):
    return random_adapter(spec, seed=5)


def rewarded(batch):
    groups = np.arange(len(batch)) // 2
    return dataclasses.replace(batch, groups=groups, rewards=np.arange(len(batch)) / len(batch))


def logprobs_and_kl(worker, spec, model):
    """By replay mode: the policy's logprobs on the routes that are replayed; by case `loss/kl`."""
    batch, table = random_batch(spec)
    parts, found = {"r3": [table], "r2": []}, {}
    for mode, routes in parts.items():
        worker.set_adapter(random_adapter(spec))
        ids = [one.tolist() for one in batch.token_ids]
        found[mode] = worker.score(ids, *routes or [None], True), {}
        for name, algorithm in CASES.items():
            trainer = {"lr": 1e-9, **LAYOUTS[model]}
            adapter = {"init_from": "start"} if name == "start" else {}
            config = RunConfig(
                model=model,
                trainer=trainer,
                adapter=adapter,
                algorithm=algorithm,
                replay={"mode": mode, "audit": 1},
            )
            worker.engine.config, worker.engine.algorithm = config, algorithms.make(config)
            worker.set_adapter(random_adapter(spec))
            worker.set_reference(start_of(spec))
            worker.engine.version = 1
            found[mode][1][name] = worker.update(rewarded(batch), *routes).metrics["loss/kl"]
    return found


def by_hugging_face(model_dir, spec, batch, adapter):
    model = hf.load(model_dir)
    if adapter is not None:
        hf.merge(model, spec, adapter)
    whole = [hf.logprobs(model, ids.tolist()) for ids in batch.token_ids]
    return of_responses(whole, batch)


def of_responses(logprobs, batch) -> np.ndarray:
    parts = [one[-len(w) :] for one, w in zip(logprobs, batch.weights, strict=True)]
    return np.concatenate(parts).astype(np.float64)


@pytest.mark.seconds
@pytest.mark.parametrize("model", LAYOUTS)
def test_the_kl_is_to_a_reference_whose_routers_choose(model):
    directory = resolve_model(model)
    config = RunConfig(model=model, trainer={"micro_batch_tokens": 60, **LAYOUTS[model]})
    spec = spec_of(directory, config)
    batch, _ = random_batch(spec)
    base = by_hugging_face(directory, spec, batch, None)
    start = by_hugging_face(directory, spec, batch, start_of(spec))
    found = run_ranks(config, directory, logprobs_and_kl, model)[0]
    for mode, (policy, kls) in found.items():
        own = of_responses(policy, batch)
        for name, kl in kls.items():
            log_ratio = (start if name == "start" else base) - own
            expected = (np.exp(log_ratio) - 1 - log_ratio).mean()
            assert expected > 0.01
            assert kl == pytest.approx(expected, rel=TOLERANCE), (mode, name)


def at_the_start(worker, spec):
    """(reference/kl, reference/moved) of two steps from the start, on random routes."""
    worker.set_adapter(start_of(spec))
    worker.set_reference(start_of(spec))
    batch, table = random_batch(spec)
    steps = [worker.update(batch, table).metrics for _ in range(2)]
    return [[one[name] for name in ("reference/kl", "reference/moved")] for one in steps]


@pytest.mark.seconds
def test_a_policy_that_is_still_the_start_is_0_away_from_it_on_any_routes():
    config = RunConfig(
        model="qwen3_moe",
        trainer={"lr": 1e-3},
        adapter={"init_from": "start"},
        algorithm=CASES["start"],
    )
    ((first, second),) = run_ranks(config, resolve_model("qwen3_moe"), at_the_start)
    assert first == [0, 0]
    assert all(value > 1e-6 for value in second), second
