"""When a run stops for what a step's metrics say, and what it leaves to look at."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment, UpdateResult
from lora_moe_rl.errors import NonFiniteError, NothingTrainedError, RewardError
from lora_moe_rl.run.records import Records, reward_metrics, set_metrics

SAMPLES = 6


def a_group() -> Group:
    response = Segment.sampled([7, 8], np.zeros(2), 3)
    segments = (Segment.given("user", [5, 6]), response)
    samples = [Sample(segments, "stop", f"response {i}") for i in range(SAMPLES)]
    return Group(Prompt(0, "1+2=", [5, 6]), samples, None, np.zeros(SAMPLES, np.float32))


def records_in(folder, run_dir=None, **trainer) -> Records:
    (folder / "config.json").write_text(json.dumps({}))
    config = RunConfig(trainer=trainer)
    return Records(config, None, folder, run_dir, None, None, done=0, dtype="float32")


def test_updates_that_are_not_finite_in_a_row_stop_the_run_and_one_that_is_begins_anew(tmp_path):
    records = records_in(tmp_path, max_skipped_steps=2)
    metrics = {"mismatch/kl": 0.0, "mismatch/judged": 1.0}
    for step, nonfinite in enumerate((1, 0, 1)):
        result = UpdateResult(0, metrics, nonfinite, nonfinite, 1.0)
        records.check_update(step, [], [], result)
    with pytest.raises(NonFiniteError, match="2 steps in a row .trainer.max_skipped_steps=2."):
        records.check_update(4, [], [], UpdateResult(0, metrics, 1, 1, 1.0))


def test_steps_without_a_token_in_the_loss_stop_the_run_and_one_with_some_begins_anew(tmp_path):
    records = records_in(tmp_path, max_skipped_steps=2)
    metrics = {"mismatch/kl": 0.0, "mismatch/judged": 1.0}
    metrics |= {"replay/masked_tokens": 7.0, "loss/rejected_tokens": 5.0}
    for step, skipped in enumerate((1, 0, 1)):
        records.check_update(step, [], [], UpdateResult(0, metrics, skipped, 0, 1.0))
    with pytest.raises(
        NothingTrainedError, match="in 2 steps in a row .* 7 were left out .*, 5 by"
    ):
        records.check_update(4, [], [], UpdateResult(0, metrics, 1, 0, 1.0))


def test_steps_without_any_reward_stop_the_run_and_one_reward_begins_anew(tmp_path):
    records = records_in(tmp_path, max_skipped_steps=2)
    none, some = a_group(), a_group()
    none.rewards[:], some.rewards[1:] = math.nan, math.nan
    for groups in ([none, none], [none, some], [none]):
        records.check_rewards(groups)
    with pytest.raises(RewardError, match="no sample had a reward in 2 steps in a row"):
        records.check_rewards([none, none])


def test_the_message_of_no_rewards_names_the_function_of_every_set(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    sets = {"a": {"path": "a.jsonl", "reward": "m:f"}, "b": {"path": "b.jsonl"}}
    config = RunConfig.model_validate(
        {"data": {"sets": sets}, "reward": {"function": "m:g"}, "trainer": {"max_skipped_steps": 1}}
    )
    records = Records(config, None, tmp_path, None, None, None, done=0, dtype="float32")
    none = a_group()
    none.rewards[:] = math.nan
    with pytest.raises(RewardError, match="data.sets.a.reward=m:f, reward.function=m:g returned"):
        records.check_rewards([none])


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
    found = reward_metrics([one, other])
    # Of 1, 3, 1, 3, 2: mean 2, deviation sqrt(4 / 5).
    expected = {"reward/mean": 2, "reward/std": 0.8**0.5, "reward/failed": 1}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert math.isnan(reward_metrics([other])["reward/mean"])
