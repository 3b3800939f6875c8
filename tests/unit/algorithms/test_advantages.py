"""Advantages of a group against values worked out by hand."""

import numpy as np
import pytest

from lora_moe_rl.algorithms.parts.advantages import group_normalized, leave_one_out

NAN = float("nan")


def test_group_normalized_by_hand():
    # Mean 0.5, deviation sqrt(4 * 0.25 / 3) = 0.57735; mean 2, deviation sqrt(2) = 1.41421.
    advantages = group_normalized(np.array([1, 0, 1, 0], np.float32), normalize_std=True)
    np.testing.assert_allclose(advantages, [0.866025, -0.866025, 0.866025, -0.866025], atol=3e-6)
    assert advantages.dtype == np.float32
    pair = group_normalized(np.array([1, 3]), normalize_std=True)
    np.testing.assert_allclose(pair, [-0.707107, 0.707107], atol=3e-6)


def test_without_the_deviation_the_spread_counts():
    advantages = group_normalized(np.array([1, 0, 0, 0]), normalize_std=False)
    np.testing.assert_allclose(advantages, [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(group_normalized(np.array([10, 0]), normalize_std=False), [5, -5])


def test_leave_one_out_by_hand():
    # Published vectors: groups [6, 3] and [9, 12].
    np.testing.assert_allclose(leave_one_out(np.array([6, 3])), [3, -3])
    np.testing.assert_allclose(leave_one_out(np.array([9, 12])), [-3, 3])
    rewards = np.array([1.0, 0.0, 0.5, NAN, 2.0])
    others = [(0 + 0.5 + 2) / 3, (1 + 0.5 + 2) / 3, (1 + 0 + 2) / 3, NAN, (1 + 0 + 0.5) / 3]
    expected = np.nan_to_num(rewards - np.array(others))
    np.testing.assert_allclose(leave_one_out(rewards), expected, atol=1e-7)


def test_a_missing_reward_is_not_a_zero():
    advantages = group_normalized(np.array([1, 0, NAN, 1, 0]), normalize_std=False)
    np.testing.assert_allclose(advantages, [0.5, -0.5, 0, 0.5, -0.5])


@pytest.mark.parametrize(
    "advantages_of",
    [
        lambda rewards: group_normalized(rewards, True),
        lambda rewards: group_normalized(rewards, False),
        leave_one_out,
    ],
)
# Equal rewards whose mean is not exact in binary; one reward; one left; none left; no samples.
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [5], [2, NAN], [NAN, NAN], []])
def test_nothing_to_compare_is_no_advantage(advantages_of, rewards):
    assert (advantages_of(np.array(rewards, np.float64)) == 0).all()
