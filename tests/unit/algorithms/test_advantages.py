"""Advantages of a group against values worked out by hand; see test_oracles.py too."""

import math

import numpy as np
import pytest

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.advantages.base import Rewarded
from lora_moe_rl.algorithms.base import Known
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.applicable import check_applicable
from lora_moe_rl.config.overrides import override
from lora_moe_rl.config.plugins import PARTS
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import FunctionRewards
from lora_moe_rl.errors import ConfigError, RewardError

NAN = float("nan")
COMPARING = [n for n in PARTS["advantage"].names() if PARTS["advantage"].find(n).compares_group]


def advantages_of(rewards, groups=None, lengths=None, baselines=None, **settings) -> np.ndarray:
    """One advantage a sample: that of its first token."""
    algorithm = algorithms.make(RunConfig(algorithm=settings))
    groups = np.zeros(len(rewards), int) if groups is None else np.array(groups)
    masks = [np.ones(n, bool) for n in lengths or [2] * len(rewards)]
    rewards = np.array(rewards, np.float64)
    step = Rewarded(rewards, groups, masks, by_function=[rewards], weights=[1.0],
                    turns=[np.zeros(len(mask), int) for mask in masks],
                    turn_keys=[[""]] * len(masks),
                    baselines=baselines and np.array(baselines))  # fmt: skip
    return np.array([one[0] for one in algorithm._advantage.of_step(step)])


def test_group_normalized_by_hand():
    # Mean 0.5, deviation sqrt(4 * 0.25 / 3) = 0.57735; mean 2, deviation sqrt(2) = 1.41421.
    found = advantages_of([1, 0, 1, 0, 1, 3], [0, 0, 0, 0, 1, 1])
    expected = [0.866025, -0.866025, 0.866025, -0.866025, -0.707107, 0.707107]
    np.testing.assert_allclose(found, expected, atol=3e-6)


def test_the_best_of_a_group_alone_by_hand():
    """Of 1, 3, 2, of deviation 1, it has 1 more than the next; two that are best have nothing, and
    what has no reward is not compared."""
    given = ([1, 3, 2, 4, 4, 0, 5, NAN, 7], [0, 0, 0, 1, 1, 1, 2, 2, 3])
    found = advantages_of(*given, advantage="grpo_passk")
    np.testing.assert_allclose(found, [0, 1, 0, 0, 0, 0, 0, 0, 0], atol=3e-6)
    found = advantages_of([0, 6, 2], advantage="grpo_passk", normalize_std=False)
    assert found.tolist() == [0, 4, 0]


def test_against_the_reward_of_a_greedy_sample_by_hand():
    given = [1, 0, 0.5, 3, 1, 1, NAN, NAN]
    baselines = [0.25, 0.25, 0.25, 2, 2, 1, 0.5, NAN]
    groups = [0, 0, 0, 1, 1, 2, 3, 4]
    found = advantages_of(given, groups, baselines=baselines, advantage="remax")
    assert found.tolist() == [0.75, -0.25, 0.25, 1, -1, 0, 0, 0]
    for missing in (None, [0.25] * 5 + [NAN] * 3):
        with pytest.raises(ValueError, match="remax needs the reward of a greedy sample"):
            advantages_of(given, groups, baselines=missing, advantage="remax")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], "no KL is known .*; take kl_in=loss"),
        (["schedule.in_flight=continue", "schedule.lag=1", "algorithm.correction=tis"],
         "algorithm=grpo, .* compares samples with a greedy one .*; use in_flight=finish"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_with_a_greedy_sample_is_refused_by_name(settings, told):
    with pytest.raises(ConfigError, match=told):
        check_applicable(override(RunConfig(), ["algorithm.advantage=remax", *settings]))


def test_one_sample_of_a_prompt_has_a_signal_against_a_greedy_one():
    config = override(RunConfig(), ["algorithm.advantage=remax", "algorithm.group_size=1",
                                    "algorithm.draw_again=2", "algorithm.overlong_buffer=8",
                                    "rollout.max_response_tokens=16"])  # fmt: skip
    check_applicable(config)
    algorithm = algorithms.make(config)
    sample = Sample((Segment.given("user", [1]), Segment.sampled([7] * 12, np.zeros(12), 0)),
                    "stop", "")  # fmt: skip
    # Four tokens into the buffer of 8: half of the punishment of 1.
    for baseline, told in ((0.5, False), (0.0, True), (1.0, True), (None, False)):
        one = Group(Prompt(0, "", [1]), [sample], None, np.ones(1, np.float32), baseline=baseline)
        assert algorithm.has_signal(one) == told


def test_groups_of_equal_rewards_do_not_dilute_gpg():
    """Two of seven samples with a reward are of a group that tells them apart."""
    given = ([1, 0, 1, 1, 0, 0, 1, NAN], [0, 0, 1, 1, 2, 2, 3, 3])
    found = advantages_of(*given, advantage="gpg")
    np.testing.assert_allclose(found, [1.75, -1.75, 0, 0, 0, 0, 0, 0])
    assert not advantages_of([1, 1, 0, 0], [0, 0, 1, 1], advantage="gpg").any()


def test_without_the_deviation_the_spread_counts():
    found = advantages_of([1, 0, 0, 0, 10, 0], [0, 0, 0, 0, 1, 1], normalize_std=False)
    np.testing.assert_allclose(found, [0.75, -0.25, -0.25, -0.25, 5, -5])


def test_the_deviation_of_the_whole_step_by_hand():
    """TRL's scale_rewards=batch: 7 rewards 1, 0, 0, 0, 10, 0, 3 of mean 2 have squared distances of
    1 + 4 * 4 + 64 + 1 = 82, so that the deviation is sqrt(82 / 6); one alone has none to compare
    with, and counts in it."""
    deviation = math.sqrt(82 / 6)
    given = ([1, 0, 0, 0, 10, 0, 3, NAN], [0, 0, 0, 0, 1, 1, 2, 2])
    found = advantages_of(*given, normalize_std="step")
    expected = np.array([0.75, -0.25, -0.25, -0.25, 5, -5, 0, 0]) / deviation
    np.testing.assert_allclose(found, expected, atol=3e-6)
    assert not advantages_of([1, 1, 1, 1], [0, 0, 1, 1], normalize_std="step").any()


def test_a_kl_is_divided_by_the_steps_deviation_where_rewards_differ_in_the_step():
    """Rewards less the KL are 0.9, 0.7, -0.2 and 0, of mean 0.35: squared distances of 0.85. Where
    all rewards are 1 the deviation would be of the KL alone."""
    algorithm = algorithms.make(RunConfig(algorithm={"normalize_std": "step"}))
    penalties = [np.array([kl]) for kl in (0.1, 0.3, 0.2, 0.0)]
    parts = np.array([0, 0, 1, 1]), [np.ones(1, bool)] * 4
    for rewards, deviation in (([1.0, 1, 0, 0], math.sqrt(0.85 / 3)), ([1.0] * 4, 1.0)):
        step = Rewarded(np.array(rewards), *parts, penalties=penalties)
        found = np.concatenate(algorithm._advantage.of_step(step))
        expected = np.array([0.1, -0.1, -0.1, 0.1]) / deviation
        np.testing.assert_allclose(found, expected, rtol=3e-6)


@pytest.mark.parametrize(("old", "new"), [(True, "group"), (False, "none")])
def test_what_normalize_std_was_before_means_the_same(old, new):
    settings = [algorithms.make(RunConfig(algorithm={"normalize_std": one})) for one in (old, new)]
    assert settings[0].settings == settings[1].settings
    by_words = override(RunConfig(), [f"algorithm.normalize_std={str(old).lower()}"])
    assert by_words == override(RunConfig(), [f"algorithm.normalize_std={new}"])


def test_leave_one_out_by_hand():
    # Published vectors: groups [6, 3], [9, 12] and [1].
    found = advantages_of([6, 3, 9, 12, 1], [0, 0, 1, 1, 2], advantage="rloo")
    np.testing.assert_allclose(found, [3, -3, -3, 3, 0])
    rewards = [1.0, 0.0, 0.5, NAN, 2.0]
    others = [(0 + 0.5 + 2) / 3, (1 + 0.5 + 2) / 3, (1 + 0 + 2) / 3, NAN, (1 + 0 + 0.5) / 3]
    expected = np.nan_to_num(np.array(rewards) - np.array(others))
    np.testing.assert_allclose(advantages_of(rewards, advantage="rloo"), expected, atol=1e-7)


def test_max_rl_by_hand():
    # Mean 0.25: (1 - 0.25) / 0.25, -1; a prompt that is solved half the time weighs less.
    found = advantages_of([1, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1], advantage="max_rl")
    np.testing.assert_allclose(found, [3, -1, -1, -1, 1, -1], rtol=1e-5)


def test_opo_weighs_the_baseline_with_lengths():
    # (1 * 3 + 0 * 1) / 4 = 0.75.
    found = advantages_of([1, 0], lengths=[3, 1], advantage="opo")
    np.testing.assert_allclose(found, [0.25, -0.75])


def test_whitening_is_over_tokens_with_a_reward():
    # Returns of 2 tokens of 1, 1 of 0; the sample without a reward does not count.
    found = advantages_of([1, 0, NAN], lengths=[2, 1, 5], advantage="reinforce_pp")
    values = np.array([1.0, 1.0, 0.0])
    expected = (values - values.mean()) / values.std(ddof=1)
    np.testing.assert_allclose(found[:2], expected[[0, 2]], rtol=1e-6)


def test_rewards_are_discounted_by_the_policys_own_tokens():
    algorithm = algorithms.make(RunConfig(algorithm={"name": "reinforce_pp", "gamma": 0.5}))
    mask = np.array([True, False, True, True])
    step = Rewarded(np.array([8.0]), np.zeros(1, int), [mask])
    (found,) = algorithm._advantage.of_step(step)
    values = np.array([2.0, 4.0, 8.0])
    expected = (values - values.mean()) / values.std(ddof=1)
    np.testing.assert_allclose(found[mask], expected, rtol=1e-6)


def test_a_missing_reward_is_not_a_zero():
    found = advantages_of([1, 0, NAN, 1, 0], normalize_std=False)
    np.testing.assert_allclose(found, [0.5, -0.5, 0, 0.5, -0.5])


@pytest.mark.parametrize("name", COMPARING)
# Equal rewards whose mean is not exact in binary; one reward; one left; none left.
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [5], [2, NAN], [NAN, NAN]])
def test_nothing_to_compare_is_no_advantage(name, rewards):
    assert (advantages_of(rewards, advantage=name) == 0).all()


def gdpo(parts, weights, rewards=None, groups=None):
    """One advantage a sample; `rewards` are by default the weighted sum."""
    algorithm = algorithms.make(RunConfig(algorithm={"advantage": "gdpo"}))
    parts = [np.array(part, np.float64) for part in parts]
    if rewards is None:
        rewards = sum(w * np.nan_to_num(part) for w, part in zip(weights, parts, strict=True))
    masks = [np.ones(1, bool)] * len(rewards)
    groups = np.zeros(len(rewards), int) if groups is None else np.array(groups)
    step = Rewarded(np.array(rewards), groups, masks, by_function=parts, weights=weights)
    return np.array([one[0] for one in algorithm._advantage.of_step(step)])


def test_each_function_is_normalized_by_itself_and_the_weighted_sum_is_whitened():
    # Both are 0.866, 0.866, -0.866, -0.866 in some order, whatever their scale: 1 and 100.
    found = gdpo([[1, 1, 0, 0], [100, 0, 100, 0]], [1.0, 0.5])
    values = np.array([1.5, 0.5, -0.5, -1.5])
    np.testing.assert_allclose(found, values / values.std(ddof=1), rtol=1e-5)


def test_a_function_that_does_not_apply_or_says_nothing_adds_nothing():
    # The first does not apply to the third sample; the second gives all the same.
    found = gdpo([[1, 0, NAN, 1, 0], [3, 3, 3, 3, 3]], [1.0, 1.0])
    values = np.array([1.0, -1.0, 0.0, 1.0, -1.0])
    np.testing.assert_allclose(found, values / values.std(ddof=1), rtol=1e-5)
    # A sample of which one function failed says nothing to the other.
    found = gdpo([[1, 0, 1], [0, NAN, 5]], [1.0, 1.0], rewards=[1, NAN, 6])
    np.testing.assert_allclose(found[[0, 2]], [-(0.5**0.5), 0.5**0.5], rtol=1e-5)


def test_rewards_that_an_environment_has_changed_are_not_taken_apart():
    with pytest.raises(RewardError, match="the environment has changed them"):
        gdpo([[1, 0], [0, 1]], [1.0, 1.0], rewards=[0.5, 1.0])


def test_a_group_of_equal_sums_has_a_signal_where_functions_differ():
    group = Group(Prompt(0, "?", [1]), [a_sample()] * 2, None, np.ones(2, np.float32))
    for name, values in (("a", [1, 0]), ("b", [0, 1])):
        group.details.by_function[name] = FunctionRewards(1.0, np.array(values, np.float32))
    of = {
        name: algorithms.make(RunConfig(algorithm={"advantage": name})) for name in ("gdpo", "grpo")
    }
    assert of["gdpo"].has_signal(group) and not of["grpo"].has_signal(group)
    same, other = group.details.by_function["a"], group.details.by_function["b"]
    same.rewards[:], other.rewards[:] = 1, [2, 2]
    assert not of["gdpo"].has_signal(group)
    other.rewards[:] = [2, 3]
    group.rewards[:] = [3, NAN]  # the second failed
    assert not of["gdpo"].has_signal(group)


def test_signals_are_made_of_what_each_function_gave():
    groups = []
    for right, short in (([1, 0, 1], [0, 5, NAN]), ([1, 1, NAN], [5, 0, 5])):
        sums = np.array(right) + 0.1 * np.nan_to_num(short)
        group = Group(Prompt(0, "?", [1]), [a_sample()] * 3, None, sums.astype(np.float32))
        for name, weight, values in (("right", 1.0, right), ("short", 0.1, short)):
            rewards = np.array(values, np.float32)
            group.details.by_function[name] = FunctionRewards(weight, rewards)
        group.details.by_function["seen"] = FunctionRewards(0.0, np.full(3, 9, np.float32))
        groups.append(group)
    algorithm = algorithms.make(RunConfig(algorithm={"advantage": "gdpo"}))
    found = [one[0] for signal in signals_of(algorithm, groups) for one in signal.advantages]
    parts = [[1, 0, 1, 1, 1, NAN], [0, 5, NAN, 5, 0, 5]]
    sums = [1, 0.5, 1, 1.5, 1, NAN]  # the last one has failed
    expected = gdpo(parts, [1.0, 0.1], sums, groups=[0, 0, 0, 1, 1, 1])
    np.testing.assert_allclose(found[:5], expected[:5], rtol=1e-5)


def a_sample() -> Sample:
    segments = (Segment.given("user", [1]), Segment.sampled([7], np.zeros(1), 0))
    return Sample(segments, "stop", "7")


def test_a_kl_is_taken_from_the_reward_of_a_sample_by_hand():
    """Rewards 1 and 0, of which 0.1 times 2 + 1 and 0.1 times -1 are taken: 0.7 and 0.1. A token
    that the policy did not write has no KL; a sample without a reward changes nothing."""
    algorithm = algorithms.make(
        RunConfig(algorithm={"name": "rloo", "kl_coef": 0.1, "kl_in": "reward"})
    )
    masks = [np.array([True, False, True]), np.array([True]), np.array([True])]
    old = [np.array([-1.0, -1.0, -1.0]), np.array([-3.0]), np.array([-1.0])]
    base = [np.array([-3.0, -9.0, -2.0]), np.array([-2.0]), np.array([-7.0])]
    known = Known(np.array([1.0, 0.0, NAN]), np.zeros(3, int), masks, old, base)
    found = algorithm.revised(known)
    np.testing.assert_allclose([one[0] for one in found], [0.6, -0.6, 0.0], atol=1e-12)
    assert algorithm.revises and algorithm.passes == {"old", "reference"}


def test_equal_rewards_of_unequal_kl_are_told_apart():
    algorithm = algorithms.make(RunConfig(algorithm={"name": "rloo", "kl_coef": 1.0}))
    masks, old = [np.ones(1, bool)] * 2, [np.array([-1.0]), np.array([-2.0])]
    known = Known(np.ones(2), np.zeros(2, int), masks, old, [np.array([-2.0])] * 2)
    assert [one[0] for one in algorithm.revised(known)] == [-1.0, 1.0]


@pytest.mark.parametrize("apart_by", [0.0, 1e-7])
def test_a_kl_is_not_divided_by_its_own_deviation_where_rewards_are_equal(apart_by):
    """Penalties of 1e-3 times 0.5 and 0.1 would be advantages of +-0.7, as those of rewards 1 and 0
    are. They are what they are, also where a judge's rounding tells the rewards apart."""
    settings = {"kl_coef": 1e-3, "kl_in": "reward"}
    algorithm = algorithms.make(RunConfig(algorithm=settings))
    masks, old = [np.ones(1, bool)] * 4, [np.array([-1.0])] * 4
    base = [np.array([kl]) for kl in (-1.5, -1.1, -1.5, -1.1)]
    rewards = np.array([1.0, 1.0 + apart_by, 1.0, 0.0])
    known = Known(rewards, np.array([0, 0, 1, 1]), masks, old, base)
    found = [one[0] for one in algorithm.revised(known)]
    np.testing.assert_allclose(found[:2], [-2e-4, 2e-4], atol=1e-6)
    of_divided = (0.9996 / 2) / (0.9996 / np.sqrt(2) + 1e-6)
    np.testing.assert_allclose(found[2:], [of_divided, -of_divided])
