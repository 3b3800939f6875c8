"""What a critic's values make of rewards, and what it learns, against verl's numbers in float64
(see test_oracles.py), published vectors and values worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_tokens import mean_over, tokens_of

from lora_moe_rl.algorithms.advantages.base import Rewarded
from lora_moe_rl.algorithms.parts.aggregation import aggregate
from lora_moe_rl.algorithms.parts.kl import estimate
from lora_moe_rl.algorithms.parts.policy_gradient import PolicyGradient
from lora_moe_rl.algorithms.parts.settings import PolicyGradientConfig
from lora_moe_rl.algorithms.parts.value_loss import explained_variance, moments, value_loss
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.errors import ConfigError

BATCHES = json.loads((Path(__file__).parent / "oracles.json").read_text())["batches"]
CLOSE = {"rtol": 1e-6, "atol": 1e-9}


class Critic(PolicyGradient):
    """A preset that says it has a critic."""

    class Settings(PolicyGradientConfig):
        has_critic = True


def part(**settings):
    read = Critic.read(settings)
    return PARTS["advantage"].find(read.advantage)(read)


def step_of(batch) -> Rewarded:
    rewards, groups = np.array(batch["rewards"]), np.array(batch["groups"])
    return Rewarded(rewards, groups, list(np.array(batch["mask"])), list(np.array(batch["values"])))


def one_sample(rewards, values, mask) -> Rewarded:
    mask = np.array(mask)
    return Rewarded(np.array(rewards), np.zeros(len(rewards), int), [mask], [np.array(values)])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("settings", "advantages", "returns"),
    [
        ({"advantage": "gae", "lambda_policy": 0.9}, "gae", "gae"),
        ({"advantage": "gae", "lambda_policy": 0.9, "lambda_value": 1.0}, "gae", "gae_1"),
        ({"advantage": "length_adaptive_gae", "length_alpha": 0.3}, "adaptive", "gae_1"),
    ],
)
def test_advantages_and_returns_are_verls_over_holes_too(batch, settings, advantages, returns):
    advantage, step = part(gamma=0.95, **settings), step_of(batch)
    mask, expected = np.array(batch["mask"]), batch["critic"]
    for found, name, what in (
        (advantage.of_step(step), advantages, "advantages"),
        (advantage.returns(step), returns, "returns"),
    ):
        theirs = np.array(expected[name][what])
        np.testing.assert_allclose(np.array(found)[mask], theirs[mask], **CLOSE)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_kl_of_each_token_goes_into_generalized_advantages_as_in_verl(batch, kind):
    old, reference = (
        torch.tensor(batch[name], dtype=torch.float64) for name in ("old", "reference")
    )
    penalties = list(0.2 * estimate(kind, old, reference).numpy())
    advantage = part(advantage="gae", gamma=0.95, lambda_policy=0.9)
    found = np.array(advantage.of_step(replace(step_of(batch), penalties=penalties)))
    mask = np.array(batch["mask"])
    theirs = np.array(batch["revised"][f"gae {kind}"])
    np.testing.assert_allclose(found[mask], theirs[mask], **CLOSE)


def test_returns_by_hand():
    # Values 1, 2, 3, reward 10 at the end; gamma 0.5, lambda 0.5: errors 0, -0.5 and 7.
    advantage = part(advantage="gae", gamma=0.5, lambda_policy=0.5)
    (found,) = advantage.returns(one_sample([10.0], [1.0, 2.0, 3.0], [True] * 3))
    last = 7.0
    middle = -0.5 + 0.25 * last
    assert found.tolist() == [1 + 0.25 * middle, 2 + middle, 3 + last]


def test_a_hole_in_the_mask_is_no_time_step():
    advantage = part(advantage="gae", gamma=0.9, lambda_policy=0.8)
    (whole,) = advantage.returns(one_sample([1.0], [0.1, 0.2, 0.3], [True] * 3))
    holed = one_sample(
        [1.0], [9.0, 0.1, 7.0, 0.2, 0.3, 5.0], [False, True, False, True, True, False]
    )
    (found,) = advantage.returns(holed)
    np.testing.assert_allclose(found[[1, 3, 4]], whole)


def test_lambdas_of_vapo():
    """Published: 0 up to 20 tokens, 0.5 at 40 and 0.98 at 1,000."""
    found = part(advantage="length_adaptive_gae").policy_lambdas(np.array([0, 1, 20, 40, 1000]))
    np.testing.assert_allclose(found, [0, 0, 0, 0.5, 0.98])


def test_a_sample_without_a_reward_changes_no_other():
    advantage = part(advantage="gae")
    mask, values = np.ones(3, bool), [np.array([0.5, 0.1, 0.4]), np.array([0.3, 0.2, 0.9])]
    both = Rewarded(np.array([1.0, np.nan]), np.zeros(2, int), [mask] * 2, values)
    alone = Rewarded(np.array([1.0]), np.zeros(1, int), [mask], values[:1])
    np.testing.assert_allclose(advantage.of_step(both)[0], advantage.of_step(alone)[0])
    assert np.isfinite(advantage.of_step(both)[1]).all()


def test_values_that_are_missing_or_of_another_length_are_refused():
    step = one_sample([1.0], [0.1, 0.2], [True] * 3)
    with pytest.raises(ValueError, match="sample 0 has 3 tokens, and 2 values"):
        part(advantage="gae").of_step(step)
    none = Rewarded(step.rewards, step.groups, step.masks)
    with pytest.raises(ValueError, match="advantage=gae needs a critic's values; there are none"):
        part(advantage="gae").returns(none)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "how", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_the_value_loss_and_its_gradient_are_verls(batch, how):
    mask = torch.tensor(batch["mask"])
    longest = mask.shape[1]

    def flat(values):
        return torch.tensor(values, dtype=torch.float64).reshape(-1)

    samples = torch.arange(len(mask)).repeat_interleave(longest)
    new = flat(batch["new_values"]).requires_grad_()
    tokens = tokens_of(new, new.detach(), new.detach(), mask=mask.reshape(-1), samples=samples)
    returns = flat(batch["critic"]["gae"]["returns"])
    values, clipped = value_loss(new, flat(batch["values"]), returns, 0.2)
    kept = mask.sum(dim=1).numpy()
    loss = mean_over(
        values, tokens, aggregate(how, kept, np.array(batch["groups"]), np.ones_like(kept), longest)
    )
    loss.backward()
    expected = batch["critic"][f"loss {how}"]
    np.testing.assert_allclose(loss.item(), expected["loss"], **CLOSE)
    np.testing.assert_allclose(new.grad, flat(expected["gradient"]), **CLOSE)
    np.testing.assert_allclose(clipped[tokens.mask].mean(), expected["clipped"], **CLOSE)
    assert 0 < expected["clipped"] < 1


def test_a_value_loss_by_hand():
    # Old value 0, return 1: a value of 2 is held at 0.5, of 0.3 is not; -1 is held at -0.5.
    values = torch.tensor([2.0, 0.3, -1.0], requires_grad=True)
    returns, old = torch.ones(3), torch.zeros(3)
    loss, clipped = value_loss(values, old, returns, 0.5)
    np.testing.assert_allclose(loss.detach(), [0.5, 0.5 * 0.49, 2.0], rtol=1e-6)
    assert clipped.tolist() == [0, 0, 0]
    # A value that has come too near to the return is held where it was allowed to come.
    near = torch.tensor([0.9], requires_grad=True)
    loss, clipped = value_loss(near, old[:1], returns[:1], 0.5)
    assert loss.item() == pytest.approx(0.5 * 0.25) and clipped.item() == 1
    loss.sum().backward()
    assert near.grad is not None and near.grad.item() == 0
    free, none = value_loss(near, old[:1], returns[:1], None)
    assert free.item() == pytest.approx(0.005) and none.item() == 0


@pytest.mark.parametrize("batch", BATCHES)
def test_the_explained_variance_is_verls_from_means_of_tokens(batch):
    mask = torch.tensor(batch["mask"])
    values = torch.tensor(batch["values"], dtype=torch.float64)[mask]
    returns = torch.tensor(batch["critic"]["gae"]["returns"], dtype=torch.float64)[mask]
    means = {name: value.mean().item() for name, value in moments(values, returns).items()}
    found = explained_variance(means, float(mask.sum()))
    np.testing.assert_allclose(found, batch["critic"]["explained"], **CLOSE)


def test_what_is_explained_by_hand():
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64) * 1e3
    for values, expected in (
        (returns, 1.0),
        (returns.new_full((4,), 1.5e3), 0.0),
        (-returns, -3.0),
    ):
        means = {name: value.mean().item() for name, value in moments(values, returns).items()}
        assert explained_variance(means, 4) == pytest.approx(expected, abs=1e-6)
    assert math.isnan(explained_variance({}, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.advantage=gae"], "advantage=gae needs a critic's value of each token, and"),
        (["algorithm.advantage=length_adaptive_gae"], "algorithm=grpo has no critic"),
        (
            ["algorithm.advantage=length_adaptive_gae", "algorithm.lambda_policy=0.9"],
            "lambda_policy=0.9 is no setting of algorithm.advantage=length_adaptive_gae: it is one "
            "of advantage=gae",
        ),
        (
            ["algorithm.advantage=gae", "algorithm.length_alpha=0.1"],
            "it is one of advantage=length_adaptive_gae",
        ),
    ],
)
def test_what_has_no_critic_and_what_has_two_lambdas_is_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        override(RunConfig(), settings)
    assert message in str(error.value)
