"""The estimate of the KL, and how far trainer and engine are apart, against values by hand."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lora_moe_rl.algorithms.parts.kl import (
    MISMATCH,
    OF_SAMPLES,
    estimate,
    k3,
    mismatch,
    mismatch_of_samples,
    worst,
)

NAN = float("nan")


def test_k3_by_hand():
    logprobs = torch.tensor([0.5, 0.25]).log()
    reference = torch.tensor([0.25, 0.5]).log()
    # r = 0.5: 0.5 - 1 + ln 2; r = 2: 2 - 1 - ln 2.
    assert_close(k3(logprobs, reference), torch.tensor([math.log(2) - 0.5, 1 - math.log(2)]))


def test_k3_estimates_the_kl():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.3, 0.2])
    exact = (p * (p / q).log()).sum()
    assert_close((p * k3(p.log(), q.log())).sum(), exact)


@pytest.mark.parametrize("kind", ["k3", "k3+"])
def test_a_token_that_the_base_finds_far_likelier_leaves_k3_and_its_gradient_finite(kind):
    """At log r = 94 exp is inf in float32; at -94 the estimate is 94 - 1, and pulls with 1."""
    logprobs = torch.tensor([-95.0, -21.5, -1.0], requires_grad=True)
    found = estimate(kind, logprobs, torch.tensor([-1.0, -1.0, -95.0]))
    at_bound = math.expm1(20) - 20
    assert_close(found.detach(), torch.tensor([at_bound, at_bound, 93.0]))
    found.sum().backward()
    wanted = [0.0, 0.0, 1.0] if kind == "k3" else [-94.0, -20.5, 94.0]
    assert_close(logprobs.grad, torch.tensor(wanted))


def test_mismatch_by_hand_and_only_where_masked():
    rollout = np.log(np.array([0.5, 0.5, 0.5], np.float32))
    trainer = np.array([math.log(0.25), math.log(0.5), NAN], np.float32)
    stats = mismatch(rollout, trainer, np.array([True, True, False]))
    assert stats["tokens"] == 2
    assert stats["kl"] == pytest.approx((math.log(2) - 0.5) / 2, rel=1e-6)
    assert stats["max_abs_logprob_diff"] == pytest.approx(math.log(2), rel=1e-6)
    assert stats["mean_abs_logprob_diff"] == pytest.approx(math.log(2) / 2, rel=1e-6)


def test_both_kls_and_chi2_estimate_what_they_are_called():
    """Every token of a distribution, weighed with the engine's probability, gives the exact one."""
    rollout, trainer = np.array([0.7, 0.2, 0.1]), np.array([0.5, 0.3, 0.2])
    one = [mismatch(np.log(rollout[[i]]), np.log(trainer[[i]]), np.ones(1, bool)) for i in range(3)]

    def mean(name):
        return sum(p * found[name] for p, found in zip(rollout, one, strict=True))

    assert mean("kl_k1") == pytest.approx((rollout * np.log(rollout / trainer)).sum())
    assert mean("kl") == pytest.approx((rollout * np.log(rollout / trainer)).sum())
    assert mean("kl_reverse") == pytest.approx((trainer * np.log(trainer / rollout)).sum())
    assert mean("chi2") == pytest.approx((trainer**2 / rollout).sum() - 1)


def test_perplexities_are_means_over_samples_of_their_own_tokens():
    rollout = np.log(np.array([0.5, 0.125, 0.5, 0.9, 0.9]))
    trainer = np.log(np.array([0.25, 0.25, 0.25, 0.9, 0.9]))
    samples = np.array([0, 0, 2, 3, -1])  # of sample 3 and the padding nothing counts
    mask = np.array([True, True, True, False, False])
    found = mismatch_of_samples(rollout, trainer, mask, samples)
    # Geometric means of 0.5 and 0.125, and 0.5; ratios 0.5 * 2 of sample 0, 0.5 of sample 2.
    assert found["rollout_ppl"] == pytest.approx((4 + 2) / 2)
    assert found["trainer_ppl"] == pytest.approx(4)
    assert found["chi2_sequence"] == pytest.approx((1 + 0.25) / 2 - 1)
    assert found["samples"] == 2
    none = mismatch_of_samples(rollout, trainer, np.zeros(5, bool), samples)
    assert none == dict.fromkeys((*OF_SAMPLES, "samples"), 0.0)


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


def test_the_worst_token_is_one_that_was_sampled_and_nan_is_worst():
    rollout, trainer = np.zeros(4, np.float32), np.array([9.0, 0.5, -2.0, 1.0], np.float32)
    sampled = np.array([False, True, True, True])
    assert worst(rollout, trainer, sampled) == (2, 2.0)
    trainer[3] = np.nan
    assert worst(rollout, trainer, sampled) == (3, math.inf)
    assert worst(rollout, trainer, np.zeros(4, bool)) is None
