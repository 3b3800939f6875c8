"""The estimate of the KL, and how far trainer and engine are apart, against values by hand."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from lora_moe_rl.algorithms.parts.kl import MISMATCH, k3, mismatch, worst

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


def test_the_worst_token_is_one_that_was_sampled_and_nan_is_worst():
    rollout, trainer = np.zeros(4, np.float32), np.array([9.0, 0.5, -2.0, 1.0], np.float32)
    sampled = np.array([False, True, True, True])
    assert worst(rollout, trainer, sampled) == (2, 2.0)
    trainer[3] = np.nan
    assert worst(rollout, trainer, sampled) == (3, math.inf)
    assert worst(rollout, trainer, np.zeros(4, bool)) is None
