"""Group-normalised advantages against values worked out by hand."""

import numpy as np
import pytest

from lora_moe_rl.algorithms.advantages import group_normalized

NAN = float("nan")


def run(rewards, groups, normalize_std=True):
    return group_normalized(np.array(rewards, np.float32), np.array(groups), normalize_std)


def test_two_groups_by_hand():
    # Mean 0.5, deviation sqrt(4 * 0.25 / 3) = 0.57735; mean 2, deviation sqrt(2) = 1.41421.
    advantages, keep = run([1, 0, 1, 0, 1, 3], [0, 0, 0, 0, 1, 1])
    expected = [0.866025, -0.866025, 0.866025, -0.866025, -0.707107, 0.707107]
    np.testing.assert_allclose(advantages, expected, atol=3e-6)
    assert keep.all() and advantages.dtype == np.float32


def test_groups_need_not_be_contiguous():
    mixed, _ = run([1, 1, 0, 3], [0, 1, 0, 1])
    np.testing.assert_allclose(mixed, [0.707106, -0.707106, -0.707106, 0.707106], atol=3e-6)


def test_without_the_deviation_the_spread_counts():
    advantages, _ = run([1, 0, 0, 0, 10, 0], [0, 0, 0, 0, 1, 1], normalize_std=False)
    np.testing.assert_allclose(advantages, [0.75, -0.25, -0.25, -0.25, 5, -5])


def test_a_missing_reward_is_not_a_zero():
    advantages, keep = run([1, 0, NAN, 1, 0], [0, 0, 0, 0, 0], normalize_std=False)
    np.testing.assert_allclose(advantages, [0.5, -0.5, 0, 0.5, -0.5])
    assert keep.tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_nothing_to_compare_is_no_advantage(normalize_std):
    # Equal rewards whose mean is not exact in binary; one reward; one left; none left.
    rewards = [0.1, 0.1, 0.1, 5, 2, NAN, NAN, NAN]
    advantages, keep = run(rewards, [0, 0, 0, 1, 2, 2, 3, 3], normalize_std)
    assert (advantages == 0).all()
    assert keep.tolist() == [True, True, True, True, True, False, False, False]


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"rewards \(3,\) and groups \(2,\)"):
        run([1, 2, 3], [0, 0])
