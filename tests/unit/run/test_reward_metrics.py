"""What is on record of a step's rewards."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import FunctionRewards
from lora_moe_rl.files.sample_records import sample_record
from lora_moe_rl.run.reward_metrics import metrics_of, reward_metrics, reweight_metrics, set_metrics

SAMPLES = 6
NAN = float("nan")


def a_group() -> Group:
    segments = (Segment.given("user", [5, 6]), Segment.sampled([7, 8], np.zeros(2), 3))
    samples = [Sample(segments, "stop", f"response {i}") for i in range(SAMPLES)]
    return Group(Prompt(0, "1+2=", [5, 6]), samples, None, np.zeros(SAMPLES, np.float32))


def test_each_data_set_has_metrics_of_its_own():
    groups = [a_group() for _ in range(4)]
    for group, name in zip(groups, ["a", "b", "a", "a"], strict=True):
        group.prompt = replace(group.prompt, data_set=name)
    groups[0].rewards[:], groups[1].rewards[:] = 1, [0, 2, 2, 2, 0, 0]
    groups[3].rewards[:3] = [1, 1, math.nan]
    found = set_metrics(groups, ["a", "b", "c"])
    # Of a: 6 times 1, 6 times 0, and 1, 1, 0, 0, 0.
    expected = {"a/groups": 3, "a/mean": 8 / 17, "a/solved_all": 1 / 3, "a/solved_none": 1 / 3}
    expected |= {"b/groups": 1, "b/mean": 1, "b/solved_all": 0, "b/solved_none": 0, "c/groups": 0}
    given = {name: value for name, value in found.items() if not math.isnan(value)}
    assert given == pytest.approx({f"reward/{name}": value for name, value in expected.items()})
    assert len(found) == 12 and set_metrics(groups, []) == {}


def test_failed_rewards_are_counted_and_not_in_the_mean():
    one, other = a_group(), a_group()
    one.rewards[:], other.rewards[:] = [1, 3, math.nan, 1, 3, 2], math.nan
    one.failures.append("prompt 0: raised")
    found = metrics_of([one, other])
    # Of 1, 3, 1, 3, 2: mean 2, deviation sqrt(4 / 4).
    expected = {"reward/mean": 2, "reward/std": 1.0, "reward/failed": 1}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert math.isnan(metrics_of([other])["reward/mean"])


def test_each_function_has_metrics_of_its_own():
    one, other = a_group(), a_group()
    values = np.array([1, 3, NAN, NAN, 2, 2], np.float32)
    one.details.by_function["right"] = FunctionRewards(0.5, values, num_failed=1)
    other.details.by_function["right"] = FunctionRewards(0.5, np.full(6, 2, np.float32))
    one.details.metrics["right/x"] = [1.0, 2.0]
    other.details.metrics["right/x"] = [6.0]
    config = RunConfig.model_validate(
        {"reward": {"functions": {"right": "m:f", "absent": {"function": "m:g"}}}}
    )
    found = reward_metrics([one, other], config)
    # Of 1, 3, 2, 2 and six times 2: mean 2, deviation sqrt(2 / 9).
    expected = {"mean": 2.0, "std": (2 / 9) ** 0.5, "none": 1, "failed": 1}
    assert {name: found[f"reward/right/{name}"] for name in expected} == pytest.approx(expected)
    assert found["reward/right/x"] == 3.0
    assert math.isnan(found["reward/absent/mean"]) and found["reward/absent/none"] == 0


def test_one_reward_has_no_deviation():
    group = a_group()
    group.rewards[1:] = NAN
    values = np.array([1, NAN, NAN, NAN, NAN, NAN], np.float32)
    group.details.by_function["right"] = FunctionRewards(1.0, values)
    config = RunConfig.model_validate({"reward": {"functions": {"right": "m:f"}}})
    assert not any(name.endswith("/std") for name in reward_metrics([group], config))


def test_none_is_counted_apart_from_failures():
    group = a_group()
    group.rewards[:4] = [NAN, NAN, NAN, 1]
    group.failures.append("prompt 0: raised")
    found = metrics_of([group])
    assert (found["reward/none"], found["reward/failed"]) == (2, 1)


def test_several_samples_of_one_conversation_count_once():
    group = a_group()
    group.conversations = np.array([0, 0, 0, 1, 1, 2])
    group.rewards[:] = [3, 3, 3, 1, 1, NAN]
    values = np.array([3, 3, 3, NAN, NAN, NAN], np.float32)
    group.details.by_function["right"] = FunctionRewards(0.5, values, num_failed=1)
    config = RunConfig.model_validate({"reward": {"functions": {"right": "m:f"}}})
    found = reward_metrics([group], config)
    assert (found["reward/mean"], found["reward/none"]) == (2.0, 1)
    assert (found["reward/right/mean"], found["reward/right/none"]) == (3.0, 1)


def test_a_teachers_metrics_are_of_the_tokens_that_it_scored():
    """Sampled at logprobs of 0; the teacher says -1 and -3 to each sample but the first of the one
    group, which it could not score, and -2 and -2 to the other's."""
    one, other = a_group(), a_group()
    assert not any(name.startswith("teacher/") for name in reward_metrics([one], RunConfig()))
    one.teacher = [np.zeros(2), *[np.array([-1.0, -3.0])] * 5]
    one.rewards[0] = math.nan
    other.teacher = [np.array([-2.0, -2.0])] * 6
    found = reward_metrics([one, other], RunConfig())
    assert found["teacher/reverse_kl"] == 2 and found["teacher/logprob"] == -2
    one.rewards[:] = math.nan
    assert math.isnan(reward_metrics([one], RunConfig())["teacher/reverse_kl"])
    assert "teacher/taught" not in found


def test_how_many_a_policy_could_teach_itself_is_told():
    """Of the samples with a reward; the first of one group has none."""
    one, other = a_group(), a_group()
    for group in (one, other):
        group.rewards[:] = 1
        group.teacher = [np.zeros(2)] * 6
        group.teacher_read = ["solution 1", "", "too long", "feedback", "", ""]
    one.rewards[0] = np.nan
    found = reward_metrics([one, other], RunConfig())
    assert found["teacher/taught"] == 3 / 11 and found["teacher/too_long"] == 2 / 11


def test_rewards_of_greedy_samples_are_on_record_where_there_are_any():
    one, other, none = a_group(), a_group(), a_group()
    one.baseline, other.baseline = 0.5, 0.0
    assert reward_metrics([one, other, none], RunConfig())["reward/baseline"] == 0.25
    assert "reward/baseline" not in reward_metrics([none], RunConfig())
    assert sample_record(1, other, None, 0)["baseline"] == 0
    assert "baseline" not in sample_record(1, none, None, 0)


def test_what_was_drawn_is_on_record_and_nothing_where_nothing_is_drawn():
    one, other = a_group(), a_group()
    one.rewards[:] = [1, 2, math.nan, 4, 5, 6]
    other.conversations = np.array([0, 0, 1, 2, 2, 2])  # its samples 1, 2 and 5 count
    other.rewards[:] = [8, 8, 9, 7, 7, 7]
    signals = [
        Signal([], [], copies=np.array([3, 0, 0, 0, 2, 0])),
        Signal([], [], copies=np.array([2, 2, 0, 1, 1, 1])),
    ]
    found = reweight_metrics([one, other], signals)
    # Eight to be drawn: 1 three times, 5 twice, 8 twice and 7 once.
    assert found == {
        "reweight/kept": 4 / 8,
        "reweight/most": 3,
        "reweight/reward_mean": (3 * 1 + 2 * 5 + 2 * 8 + 7) / 8,
    }
    assert reweight_metrics([one], [Signal([], [])]) == {}
    (none,) = [Signal([], [], copies=np.zeros(6, np.int64))]
    assert math.isnan(reweight_metrics([one], [none])["reweight/kept"])
