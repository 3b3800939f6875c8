"""Several rewards as one: the weighted sum, None, failures, what is on record of each."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.config import RewardFunction
from lora_moe_rl.data.scores import Details, Scores
from lora_moe_rl.rewards.combining import combine

NAN = float("nan")


def function(name: str, weight: float) -> RewardFunction:
    return RewardFunction(f"reward.functions.{name}.function", "m:f", {}, weight, name)


def scores(values, reasons=None, **told) -> Scores:
    reasons = reasons or {}
    rewards = np.array(values, np.float32)
    return Scores(rewards, list(reasons.values()), Details(reasons=reasons, **told))


def test_the_reward_is_the_weighted_sum_of_those_that_apply():
    right = scores([1.0, 0.0, NAN, NAN], extra={"why": [1, 2, 3, 4]}, metrics={"x": [1.0]})
    short = scores([0.5, -1.0, 0.25, NAN], metrics={"x": [2.0]})
    found = combine([function("right", 2.0), function("short", -0.5)], [right, short])
    # 2 - 0.25, 0 + 0.5, -0.125 alone, and none that applies.
    np.testing.assert_array_equal(found.rewards, np.float32([1.75, 0.5, -0.125, NAN]))
    assert found.failures == [] and found.rewards.dtype == np.float32
    assert found.details.extra == {"right/why": [1, 2, 3, 4]}
    assert found.details.metrics == {"right/x": [1.0], "short/x": [2.0]}
    both = found.details.by_function
    assert [(name, one.weight, one.num_failed) for name, one in both.items()] == [
        ("right", 2.0, 0),
        ("short", -0.5, 0),
    ]
    np.testing.assert_array_equal(both["short"].rewards, short.rewards)


def test_a_sample_of_which_one_function_failed_has_failed_once():
    right = scores([1.0, NAN, NAN], {1: "prompt 0: m:f raised", 2: "prompt 0: m:f raised"})
    short = scores([0.5, 0.5, NAN], {2: "prompt 0: m:g raised"})
    found = combine([function("right", 1.0), function("short", 1.0)], [right, short])
    np.testing.assert_array_equal(found.rewards, np.float32([1.5, NAN, NAN]))
    assert found.failures == ["prompt 0: m:f raised"] * 2
    assert found.details.reasons == {1: "prompt 0: m:f raised", 2: "prompt 0: m:f raised"}
    assert [one.num_failed for one in found.details.by_function.values()] == [2, 1]


def test_a_function_of_weight_0_is_on_record_and_changes_nothing():
    right = scores([1.0, 0.0, NAN])
    seen = scores([NAN, 7.0, 7.0], {0: "prompt 0: m:f raised"})
    found = combine([function("right", 1.0), function("seen", 0.0)], [right, seen])
    np.testing.assert_array_equal(found.rewards, np.float32([1.0, 0.0, NAN]))
    assert found.failures == [] and found.details.by_function["seen"].num_failed == 1


def test_turns_have_the_weighted_sum_and_what_tells_nothing_of_them_is_earned_at_the_end():
    some = scores([1.0, 1.0, 1.0], by_turn={0: [0.75, 0.25], 2: [0.5, 0.5]})
    whole, none = scores([0.5, 0.5, NAN]), scores([9.0, 9.0, 9.0], by_turn={1: [9.0]})
    functions = [function("some", 2.0), function("whole", -1.0), function("none", 0.0)]
    found = combine(functions, [some, whole, none])
    assert found.rewards.tolist() == [1.5, 1.5, 2.0]
    assert found.details.by_turn == {0: [1.5, 0.0], 2: [1.0, 1.0]}
