"""The plain reference of `verify algorithm` on a step of two samples, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.verify.algorithm_jobs import plain

OWN = [np.array([-1.0, -1.0]), np.array([-2.0])]


def step(**more) -> TrainBatch:
    """Responses of 2 and 1 tokens, advantages 1 and -1, in which the engine gives the tokens a
    probability of half, all and a quarter of the trainer's."""
    batch = TrainBatch.from_sequences([np.zeros(3, np.int32), np.zeros(2, np.int32)])
    batch.advantages = [np.ones(2, np.float32), -np.ones(1, np.float32)]
    ratios = ([2.0, 1.0], [4.0])
    batch.logprobs = [o - np.log(r) for o, r in zip(OWN, ratios, strict=True)]
    for name, value in more.items():
        setattr(batch, name, value)
    return batch


def worths(algorithm: dict, batch: TrainBatch) -> np.ndarray:
    base = [np.array([-1.0, -2.0]), np.array([-4.0])]
    _, found = plain(RunConfig(algorithm=algorithm), batch, OWN, base)
    return np.concatenate(found.logprobs)


def test_on_policy_a_token_is_worth_its_advantage():
    np.testing.assert_allclose(worths({}, step()), [-1 / 3, -1 / 3, 1 / 3])


def test_an_entropy_bonus_is_worth_its_coefficient_of_each_token():
    base = [np.array([-1.0, -2.0]), np.array([-4.0])]
    for coef in (0.0, 0.3):
        config = RunConfig(algorithm={"entropy_coef": coef})  # pyright: ignore[reportArgumentType]
        _, found = plain(config, step(), OWN, base)
        np.testing.assert_allclose(np.concatenate(found.entropies), [-coef / 3] * 3)


def test_a_divergence_is_worth_the_same_of_each_token_and_logprobs_nothing():
    base = [np.array([-1.0, -2.0]), np.array([-4.0])]
    config = RunConfig(algorithm={"name": "distillation"})  # pyright: ignore[reportArgumentType]
    _, found = plain(config, step(), OWN, base)
    np.testing.assert_allclose(np.concatenate(found.divergences), [1 / 3] * 3)
    assert not np.concatenate(found.logprobs).any()


def test_weights_are_divided_by_their_mean_before_rejection():
    # Weights 2, 1 and 2 (bounded), a mean of 5/3; the third token's sample is rejected.
    settings = {"correction": "tis", "correction_normalize": True, "rejection": "veto"}
    found = worths(settings | {"rejection_max": 3.0}, step())
    np.testing.assert_allclose(found, [-1.2 / 2, -0.6 / 2, 0], rtol=1e-6)


def test_advantages_are_made_of_rewards_less_the_kl():
    # Rewards 1 and 1, KLs of 0 + 1 and 2 a sample: 0.9 and 0.8.
    found = worths({"name": "rloo", "kl_coef": 0.1}, step(rewards=np.ones(2)))
    np.testing.assert_allclose(found, [-0.1 / 3, -0.1 / 3, 0.1 / 3], rtol=1e-6)
    with pytest.raises(AssertionError):
        worths({"name": "rloo", "kl_coef": 0.1}, step())
