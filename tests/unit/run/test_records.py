"""When a run stops for what a step's metrics say, and what it leaves to look at."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment, UpdateResult
from lora_moe_rl.errors import MismatchError, NonFiniteError, RewardError
from lora_moe_rl.files.run_dir import RunDir, read_jsonl
from lora_moe_rl.run.records import Records, reward_metrics, set_metrics

SAMPLES = 6
WORST = (
    "token 8 at 3 of sample 4 (row 0, 2 tokens of prompt, version 3), rollout -2.0000 and trainer "
    "-0.5000"
)


def a_group() -> Group:
    response = Segment.sampled([7, 8], np.zeros(2), 3)
    segments = (Segment.given("user", [5, 6]), response)
    samples = [Sample(segments, "stop", f"response {i}") for i in range(SAMPLES)]
    return Group(Prompt(0, "1+2=", [5, 6]), samples, None, np.zeros(SAMPLES, np.float32))


@pytest.fixture
def check(tmp_path):
    """Checks an update of step 4 whose mismatch/kl is `kl`; returns the samples on record."""
    (tmp_path / "config.json").write_text(json.dumps({}))

    def check(kl: float, dtype="float32", nonfinite=0, **mismatch) -> list[str]:
        config = RunConfig(
            mismatch=mismatch,
            logging={"run_dir": str(tmp_path / "run"), "samples_per_step": 1},
        )
        with RunDir(config, resume=(tmp_path / "run").exists()) as run_dir:
            records = Records(config, None, tmp_path, run_dir, None, None, done=3, dtype=dtype)
            group = a_group()
            signals = [Signal.of_samples(group, group.rewards)]
            metrics = {"mismatch/kl": kl, "mismatch/max_abs_logprob_diff": 1.5}
            worst = {"sample": 4, "token": 3, "rollout_logprob": -2.0, "trainer_logprob": -0.5}
            metrics |= {f"mismatch/worst_{name}": value for name, value in worst.items()}
            result = UpdateResult(4, metrics, skipped=nonfinite, nonfinite=nonfinite, seconds=1.0)
            try:
                records.check_update(4, [group], signals, result)
            finally:
                written = run_dir.samples_file.exists() and read_jsonl(run_dir.samples_file)
                check.samples = [record["response"] for record in written or ()]
        return check.samples

    return check


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_a_mismatch_above_the_bound_stops_the_run(check, dtype, bound):
    assert check(0.9 * bound, dtype) == []
    with pytest.raises(MismatchError) as caught:
        check(1.1 * bound, dtype)
    for text in (
        "step 4",
        f"{1.1 * bound:.2e}, more than {bound:.2e}",
        "1.50e+00 apart",
        "stop_",
        WORST,
    ):
        assert text in str(caught.value)


def test_all_samples_of_the_step_that_stops_a_run_are_written(check):
    with pytest.raises(MismatchError, match="samples.jsonl"):
        check(1.0)
    assert check.samples == [f"response {i}" for i in range(SAMPLES)]


def test_the_bound_is_a_setting(check):
    assert check(0.5, stop_above=0.6) == []
    with pytest.raises(MismatchError, match="5.00e-01, more than 4.00e-01"):
        check(0.5, stop_above=0.4)


@pytest.mark.parametrize("kl", [math.inf, math.nan])
def test_a_mismatch_that_is_no_number_stops_the_run(check, kl):
    with pytest.raises(MismatchError):
        check(kl)


def test_a_step_of_nan_is_left_to_the_bound_on_skipped_steps(check):
    assert check(math.nan, nonfinite=1) == []


def records_in(folder, run_dir=None, **trainer) -> Records:
    (folder / "config.json").write_text(json.dumps({}))
    config = RunConfig(trainer=trainer)
    return Records(config, None, folder, run_dir, None, None, done=0, dtype="float32")


def test_updates_that_are_not_finite_in_a_row_stop_the_run_and_one_that_is_begins_anew(tmp_path):
    records = records_in(tmp_path, max_skipped_steps=2)
    metrics = {"mismatch/kl": 0.0, "mismatch/max_abs_logprob_diff": 0.0}
    for step, nonfinite in enumerate((1, 0, 1)):
        records.check_update(step, [], [], UpdateResult(0, metrics, 1, nonfinite, 1.0))
    with pytest.raises(NonFiniteError, match="2 steps in a row .trainer.max_skipped_steps=2."):
        records.check_update(4, [], [], UpdateResult(0, metrics, 1, 1, 1.0))


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
