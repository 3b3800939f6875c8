"""The policy loss, the KL estimators and GRPO's loss against values worked out by hand."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lora_moe_rl.algorithms import grpo
from lora_moe_rl.algorithms.kl import MISMATCH, k3, mismatch
from lora_moe_rl.algorithms.policy_loss import clipped_policy_loss
from lora_moe_rl.config import AlgorithmConfig

NAN = float("nan")


def test_clipping_by_hand():
    ratio = torch.tensor([1.5, 1.1, 0.5, 0.5, 1.5])
    advantages = torch.tensor([1.0, 2.0, -1.0, 1.0, -1.0])
    old = torch.full((5,), -2.0)
    logprobs = (old + ratio.log()).requires_grad_()
    mask = torch.ones(5, dtype=torch.bool)
    loss, sums = clipped_policy_loss(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.3)
    # Too far up with a gain: 1.3. Within: 2.2. Too far down with a loss: -0.8. Moves against the
    # advantage are never clipped: 0.5 and -1.5.
    assert_close(loss, torch.tensor(-(1.3 + 2.2 - 0.8 + 0.5 - 1.5)))
    assert_close(sums["clipped_high"], torch.tensor(1.0))
    assert_close(sums["clipped_low"], torch.tensor(1.0))
    assert_close(sums["ratio"], torch.tensor(5.1))
    loss.backward()
    assert_close(logprobs.grad, torch.tensor([0.0, -2.2, 0.0, -0.5, 1.5]))


def test_on_policy_the_gradient_is_the_advantage():
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    advantages = torch.tensor([0.7, -0.4])
    loss, _ = clipped_policy_loss(
        logprobs, logprobs.detach(), advantages, torch.ones(2, dtype=torch.bool), 0.2, 0.2
    )
    loss.backward()
    assert_close(logprobs.grad, -advantages)


def test_k3_by_hand():
    logprobs = torch.tensor([0.5, 0.25]).log()
    reference = torch.tensor([0.25, 0.5]).log()
    # r = 0.5: 0.5 - 1 + ln 2; r = 2: 2 - 1 - ln 2.
    assert_close(k3(logprobs, reference), torch.tensor([math.log(2) - 0.5, 1 - math.log(2)]))


def test_k3_estimates_the_kl():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    exact = (p * (p / q).log()).sum()
    assert_close((p * k3(p.log(), q.log())).sum(), exact)


def test_mismatch_by_hand_and_only_where_masked():
    rollout = np.log(np.array([0.5, 0.5, 0.5], np.float32))
    trainer = np.array([math.log(0.25), math.log(0.5), NAN], np.float32)
    stats = mismatch(rollout, trainer, np.array([True, True, False]))
    assert stats["tokens"] == 2
    assert stats["kl"] == pytest.approx((math.log(2) - 0.5) / 2, rel=1e-6)
    assert stats["max_abs_logprob_diff"] == pytest.approx(math.log(2), rel=1e-6)
    assert stats["mean_abs_logprob_diff"] == pytest.approx(math.log(2) / 2, rel=1e-6)


def test_mismatch_counts_tokens_off_by_more_than_2x():
    rollout = np.log(np.array([0.5, 0.5, 0.2, 0.9], np.float32))
    trainer = np.log(np.array([0.26, 0.24, 0.5, 0.9], np.float32))
    assert mismatch(rollout, trainer, np.ones(4, bool))["off_by_2x"] == 0.5


def test_mismatch_of_rounding_errors_keeps_its_digits():
    rollout = np.zeros(4, np.float32)
    stats = mismatch(rollout, rollout + np.float32(1e-5), np.ones(4, bool))
    assert stats["kl"] == pytest.approx(5e-11, rel=1e-3)


def test_mismatch_shows_a_nan_and_survives_no_tokens():
    nan = mismatch(np.zeros(2), np.array([0.0, NAN]), np.ones(2, bool))
    assert math.isnan(nan["kl"]) and math.isnan(nan["max_abs_logprob_diff"])
    none = mismatch(np.zeros(2), np.zeros(2), np.zeros(2, bool))
    assert set(none) == {*MISMATCH, "tokens"} and not any(none.values())


def grpo_inputs():
    """Two tokens that count (ratio 1, advantages 1 and -2) and one that does not and is all NaN."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    return logprobs, {
        "old_logprobs": torch.tensor([-1.0, -2.0, NAN]),
        "advantages": torch.tensor([1.0, -2.0, NAN]),
        "mask": torch.tensor([True, True, False]),
    }


def test_grpo_without_kl():
    logprobs, inputs = grpo_inputs()
    total, sums = grpo.loss(logprobs, **inputs, ref_logprobs=None, config=AlgorithmConfig())
    assert_close(total, torch.tensor(1.0))
    assert {key: value.item() for key, value in sums.items()} == {
        "tokens": 2, "policy_loss": 1, "kl": 0, "ratio": 2, "clipped_low": 0, "clipped_high": 0
    }  # fmt: skip
    total.backward()
    assert_close(logprobs.grad, torch.tensor([-1.0, 2.0, 0.0]))


def test_grpo_with_kl():
    logprobs, inputs = grpo_inputs()
    reference = torch.tensor([-1.0 + math.log(2), -2.0, NAN])
    total, sums = grpo.loss(
        logprobs, **inputs, ref_logprobs=reference, config=AlgorithmConfig(kl_coef=0.1)
    )
    assert_close(sums["kl"], torch.tensor(1 - math.log(2)))  # r = 2 and r = 1
    assert_close(total, torch.tensor(1.0 + 0.1 * (1 - math.log(2))))
    total.backward()
    # d/dlogp of k3 is 1 - r: -1 at r = 2.
    assert_close(logprobs.grad, torch.tensor([-1.0 - 0.1, 2.0, 0.0]))


@pytest.mark.parametrize(("kl_coef", "reference"), [(0.1, None), (0.0, torch.zeros(3))])
def test_grpo_wants_a_reference_exactly_when_it_is_used(kl_coef, reference):
    logprobs, inputs = grpo_inputs()
    with pytest.raises(ValueError, match=f"kl_coef={kl_coef}"):
        config = AlgorithmConfig(kl_coef=kl_coef)
        grpo.loss(logprobs, **inputs, ref_logprobs=reference, config=config)
