"""What a config says of a critic, and what it makes of a step's groups. The critic itself is in
tests/integration/test_critic.py, its parts in test_values.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from packed_tokens import tokens_of

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.base import Algorithm, Known, Signal
from lora_moe_rl.algorithms.parts.step_signals import revised
from lora_moe_rl.algorithms.ppo import PPO
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.errors import ConfigError

MASKS = [np.array([True, False, True]), np.array([True, True])]
VALUES = [np.array([0.25, 9.0, 0.5]), np.array([-0.5, 0.0])]


def made(*settings: str):
    return algorithms.make(override(RunConfig(), ["trainer.steps=100", *settings]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=ppo", "algorithm.advantage=grpo"], "grpo.*does not read its values"),
        (["algorithm=grpo", "algorithm.advantage=gae"], "grpo has no critic"),
        (["algorithm=vapo", "trainer.steps=50"], "critic_warmup=50 leaves the policy none"),
        (["algorithm=grpo", "algorithm.critic_lr=1e-4"], "critic_lr"),
        (["algorithm=vapo", "algorithm.aggregation=prompt-mean"], "take aggregation=token-mean"),
        (
            ["algorithm=vapo", "algorithm.correction=tis", "algorithm.correction_normalize=true"],
            "each want a mean over the step",
        ),
        (
            ["algorithm=ppo", "algorithm.critic_routes=rollout", "replay.mode=r2"],
            "critic_routes=rollout wants the rollout's routes.*replay.mode=r2",
        ),
        (
            [
                "algorithm=ppo",
                "algorithm.critic_lr=1e-6",
                "trainer.lr_schedule=cosine",
                "trainer.min_lr=1e-5",
            ],
            "critic_lr=1e-06 is below trainer.min_lr=1e-05, to which trainer.lr_schedule=cosine",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        made(*settings)


class Forgetful(PPO):
    """An algorithm of one's own whose critic has nothing to learn."""

    returns = Algorithm.returns

    @property
    def passes(self):
        return frozenset()


def test_a_critic_without_returns_is_refused_before_anything_starts():
    words = (
        "has a critic, but Forgetful writes no `returns` and does not name `values` among its "
        "passes: a critic learns the returns"
    )
    with pytest.raises(ConfigError, match=words):
        made(f"algorithm={__file__}:Forgetful")


def test_right_samples_of_vapo_are_made_likelier_by_hand():
    """Four tokens, of which the first two are of a right sample: their share is 1/2. Minus a tenth
    of the mean of their logprobs, -1 and -3, is 0.2."""
    logprobs = torch.tensor([-1.0, -3.0, -2.0, -5.0], requires_grad=True)
    rewards = torch.tensor([0.5, 0.5, 0.0, -1.0])
    mask = torch.tensor([True, True, True, True])
    tokens = replace(tokens_of(logprobs, logprobs.detach(), torch.zeros(4), mask), rewards=rewards)
    algorithm = made("algorithm=vapo")
    right, every = algorithm.averaged(tokens)
    share = (right.sum() / every.sum()).item()
    assert share == 0.5 and algorithm.averages
    found = algorithm.loss(replace(tokens, step_mean=share))
    assert found.values.mean().item() == pytest.approx(0.2)
    assert found.metrics["nll"].mean().item() == pytest.approx(2.0)
    found.values.mean().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.05, -0.05, 0, 0])
    # With a rejection it is the mean over the right tokens that are left: of three the first.
    assert algorithm.averages_kept
    left = replace(tokens, mask=torch.tensor([True, False, True, True]))
    right, every = (one[left.mask] for one in algorithm.averaged(left))
    found = algorithm.loss(replace(left, step_mean=(right.sum() / every.sum()).item()))
    assert found.metrics["nll"][left.mask].mean().item() == pytest.approx(1.0)
    # Where none is right nothing is added, and without the weight nothing is asked for.
    none = replace(tokens, rewards=rewards - 1, step_mean=0.0)
    assert not algorithm.loss(none).values.any()
    without = made("algorithm=vapo", "algorithm.nll_weight=0")
    assert (
        not (without.averages or without.averages_kept)
        and not without.loss(replace(tokens, rewards=None)).values.any()
    )
    with pytest.raises(ValueError, match="it is missing"):
        algorithm.loss(tokens)


def test_what_wants_a_critic_says_so():
    assert made("algorithm=grpo").critic is None
    ppo, vapo = made("algorithm=ppo"), made("algorithm=vapo")
    assert ppo.critic is not None and ppo.passes == {"values"} and ppo.revises
    assert vapo.critic is not None and vapo.critic.critic_warmup == 50
    assert made("algorithm=ppo", "algorithm.kl_coef=0.1").passes == {"values", "reference"}


def test_advantages_and_returns_by_hand():
    """Lambda 0.5, gamma 1, over the tokens that the policy wrote. Sample 0, reward 1: deltas 0.25
    and 0.5, advantages 0.5 and 0.5. Sample 1, reward 0: deltas 0.5 and 0, advantages 0.5 and 0."""
    algorithm = made("algorithm=ppo", "algorithm.lambda_policy=0.5")
    known = Known(np.array([1.0, 0.0]), np.zeros(2, int), MASKS, values=VALUES)
    returns = [one[mask] for one, mask in zip(algorithm.returns(known), MASKS, strict=True)]
    np.testing.assert_allclose(np.concatenate(returns), [0.75, 1.0, 0.0, 0.0])
    advantages = np.concatenate(
        [one[mask] for one, mask in zip(algorithm.revised(known), MASKS, strict=True)]
    )
    plain = np.array([0.5, 0.5, 0.5, 0.0])
    np.testing.assert_allclose(advantages, (plain - plain.mean()) / plain.std(ddof=1), rtol=1e-6)


def test_a_kl_in_the_reward_is_taken_at_its_token():
    """With values of 0 and lambda 1: what is still to come, less the KL on the way."""
    algorithm = made("algorithm=ppo", "algorithm.kl_coef=0.5", "algorithm.kl_in=reward")
    assert algorithm.passes == {"old", "reference", "values"}
    masks, zeros = [np.ones(2, bool)], [np.zeros(2)]
    old, reference = [np.array([-1.0, -1.0])], [np.array([-2.0, -1.5])]
    known = Known(np.ones(1), np.zeros(1, int), masks, old, reference, zeros)
    np.testing.assert_allclose(algorithm.returns(known)[0], [1 - 0.5 - 0.25, 1 - 0.25])


def test_rewards_wait_for_values_and_what_comes_takes_their_place():
    algorithm = made("algorithm=ppo")
    segments = (Segment.given("user", [5]), Segment.sampled([7, 8], np.zeros(2), 0))
    sample = Sample(segments, "stop", "text")
    group = Group(Prompt(0, "", [1]), [sample, sample], None, np.array([1.0, 0.0], np.float32))
    (waiting,) = algorithm.signals([group])
    assert (waiting.rewards == [1, 0]).all()
    assert all((one == 0).all() for one in waiting.advantages)
    found = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    (signal,) = revised([waiting], found)
    assert isinstance(signal, Signal) and signal.weights is waiting.weights
    np.testing.assert_array_equal(signal.advantages, found)
    assert revised([waiting], None) == [waiting]
