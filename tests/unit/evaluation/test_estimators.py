"""pass@k, maj@k and intervals against counting all ways, hand computations and other libraries."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from lora_moe_rl.evaluation.estimators import majority, mean_and_interval, pass_at_k


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_right_sample(num_samples):
    for num_right in range(num_samples + 1):
        right = [i < num_right for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(combinations(right, k))
            share = Fraction(sum(map(any, subsets)), len(subsets))
            assert pass_at_k(num_samples, num_right, k) == pytest.approx(float(share), abs=1e-15)


def test_pass_at_k_by_hand():
    # 1 - C(7, 4) / C(10, 4) = 1 - 35 / 210
    assert pass_at_k(10, 3, 4) == pytest.approx(5 / 6, abs=1e-15)
    assert pass_at_k(4, 1, 1) == 0.25
    assert math.isnan(pass_at_k(3, 3, 4))


def test_pass_at_k_is_not_the_biased_estimate():
    """1 - (1 - c/n)^k, which draws with putting back, is smaller."""
    assert pass_at_k(8, 2, 4) == pytest.approx(1 - 15 / 70) and 1 - (1 - 2 / 8) ** 4 < 0.7


def test_pass_at_k_of_many_samples_is_the_product_of_the_paper():
    """The numerically stable form in Chen et al. 2021, figure 3."""
    for num_right in (1, 17, 150):
        product = np.prod(1.0 - 100 / np.arange(200 - num_right + 1, 200 + 1))
        assert pass_at_k(200, num_right, 100) == pytest.approx(1 - product, abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["3", "3", "4"], [1, 1, 0], 1.0),
        (["3", "4", "4"], [1, 0, 0], 0.0),
        (["3", "3", "4", "4"], [1, 1, 0, 0], 0.5),  # a tie: either of the two
        (["3", None, None, None], [1, 0, 0, 0], 1.0),  # no answer is no vote
        ([None, None], [0, 0], 0.0),
        (["3", "3", "3", "4"], [1, 0, 1, 1], 2 / 3),  # one answer that is not always right
    ],
)
def test_the_majority_by_hand(answers, right, expected):
    assert majority(answers, right) == pytest.approx(expected)


def test_the_interval_is_that_of_the_normal_distribution():
    values = [0.0, 0.25, 1.0, 0.5, 0.75]
    mean, half = mean_and_interval([*values, math.nan])
    error = statistics.stdev(values) / math.sqrt(5)
    sampling = statistics.NormalDist(statistics.mean(values), error)
    low, high = sampling.inv_cdf(0.025), sampling.inv_cdf(0.975)
    assert (mean - half, mean + half) == pytest.approx((low, high), abs=1e-9)


def test_too_few_prompts_have_no_interval():
    assert mean_and_interval([0.5])[0] == 0.5 and math.isnan(mean_and_interval([0.5])[1])
    assert all(map(math.isnan, mean_and_interval([math.nan])))
