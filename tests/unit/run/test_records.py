"""When a run stops for what a step's metrics say, and what it leaves to look at."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment, UpdateResult
from lora_moe_rl.errors import NonFiniteError, NothingTrainedError, RewardError
from lora_moe_rl.files.run_dir import RunDir, read_jsonl
from lora_moe_rl.run.records import Records

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


class Saving(Exception):
    """Raised by a trainer that is asked for its state."""


class Trainer:
    def save(self, directory):
        raise Saving


@pytest.mark.parametrize(
    ("newest", "step", "saves"), [(0, 1, False), (4, 5, False), (3, 5, True), (0, 2, True)]
)
def test_a_step_without_rewards_leaves_its_samples_and_a_checkpoint_of_the_step_before(
    tmp_path, newest, step, saves
):
    (tmp_path / "config.json").write_text("{}")
    config = RunConfig(logging={"run_dir": str(tmp_path / "run"), "samples_per_step": 1})
    group = a_group()
    group.rewards[:] = math.nan
    group.details.reasons[2] = "prompt 0: the judge is gone"
    with RunDir(config, resume=False) as run_dir:
        if newest:
            (run_dir.checkpoints / f"step-{newest:06d}").mkdir()
        records = Records(config, None, tmp_path, run_dir, Trainer(), None, done=4, dtype="float32")
        with pytest.raises(Saving) if saves else nullcontext():
            records.keep_unrewarded(step, [group, group], {})
        kept = list(read_jsonl(run_dir.samples_file))
    assert len(kept) == 2 * SAMPLES and {one["step"] for one in kept} == {step}
    assert [one.get("failure") for one in kept[1:4]] == [None, "prompt 0: the judge is gone", None]
    assert kept[0]["reward"] is None and kept[0]["advantage"] is None
