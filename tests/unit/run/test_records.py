"""When a run stops for what a step's metrics say, and what it leaves to look at."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.update_result import UpdateResult
from lora_moe_rl.errors import NonFiniteError, NothingTrainedError, RewardError
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.run.plateau import Look, Plateau
from lora_moe_rl.run.records import Records
from lora_moe_rl.run.sample_metrics import continued_metrics, environment_metrics, rollout_metrics

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
    with pytest.raises(
        NonFiniteError,
        match="2 steps in a row .trainer.max_skipped_steps=2.: 3 of the last one.s optimizer steps",
    ):
        records.check_update(4, [], [], UpdateResult(0, metrics, 1, 3, 1.0))


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


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (
            {"loss/weight_squared": 0.0},
            "weight of every token was 0.*correction=mis.*correction_max",
        ),
        ({"loss/rejected_share": 1.0}, "rejection=none rejected every token"),
    ],
)
def test_steps_in_which_every_tokens_loss_is_0_stop_the_run_too(tmp_path, found, why):
    (tmp_path / "config.json").write_text("{}")
    config = RunConfig(trainer={"max_skipped_steps": 2}, algorithm={"correction": "mis"})
    records = Records(config, None, tmp_path, None, None, None, done=0, dtype="float32")
    metrics = {"mismatch/kl": 0.0, "mismatch/judged": 1.0}
    some = metrics | dict.fromkeys(found, 0.5)
    for step, one in enumerate((metrics | found, some, metrics | found)):
        records.check_update(step, [], [], UpdateResult(0, one, 0, 0, 1.0))
    with pytest.raises(NothingTrainedError, match=f"in 2 steps in a row .*{why}"):
        records.check_update(4, [], [], UpdateResult(0, metrics | found, 0, 0, 1.0))


def test_too_many_failed_rewards_stop_the_run_with_step_function_and_reason(tmp_path):
    records = records_in(tmp_path)
    records.done = 11
    group = a_group()
    group.rewards[:4] = math.nan
    group.failures.extend(["prompt 0: m:f returned 1.0 for 6 samples"] * 4)
    allowed = records.config.reward.max_failed
    assert allowed * SAMPLES < 4
    with pytest.raises(RewardError) as error:
        records.check_rewards([group])
    assert str(error.value) == (
        f"step 12: 4 of 6 rewards failed, more than reward.max_failed={allowed:g} allows; the "
        "first: prompt 0: m:f returned 1.0 for 6 samples"
    )


def test_prompts_that_never_have_a_signal_stop_the_run_after_the_bound(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = RunConfig(algorithm={"draw_again": 2, "prompts_per_step": 3})
    records = Records(config, None, tmp_path, None, None, None, done=0, dtype="float32")
    easy, none = a_group(), a_group()
    easy.rewards[:], none.rewards[:] = 1.0, math.nan
    for _ in range(6):
        records.drawn_again(easy)
    with pytest.raises(
        RewardError,
        match="7 prompts .* .the last: all 1.*draw_again=2 .*: raise algorithm.draw_again, or take",
    ):
        records.drawn_again(easy)
    with pytest.raises(RewardError, match="8 prompts of one step .* .the last: none at all."):
        records.drawn_again(none)


def test_a_run_that_ends_before_its_time_wants_a_checkpoint_of_what_was_trained(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    config = RunConfig(logging={"run_dir": str(tmp_path / "run")})
    with RunDir(config, resume=False) as run_dir:
        records = Records(config, None, tmp_path, run_dir, None, None, done=3, dtype="float32")
        assert not records.keep_trained(0) and capsys.readouterr().err == ""
        assert not records.keep_trained(3)  # it has gone on from that
        (run_dir.checkpoints / "step-000004").mkdir(parents=True)  # damaged: it was skipped
        assert records.keep_trained(4)
        assert records.end_early(Plateau(Look(2, 0.5), 2), 4)
        records.checkpoints.newest = 4  # as `write` leaves it
        assert not records.keep_trained(4)
    assert "--resume goes on after step 4" in capsys.readouterr().err


def test_each_step_that_is_filled_ahead_may_replace_as_many_prompts(tmp_path):
    """Steps of three groups: 5 replaced and 3 that stayed, twice; 18 are allowed for three."""
    (tmp_path / "config.json").write_text("{}")
    config = RunConfig(algorithm={"draw_again": 2, "prompts_per_step": 3})
    records = Records(config, None, tmp_path, None, None, None, done=0, dtype="float32")
    easy = a_group()
    easy.rewards[:] = 1.0
    for _ in range(2):
        for _ in range(5):
            records.drawn_again(easy)
        for _ in range(3):
            records.rolled(8)
    for _ in range(8):
        records.drawn_again(easy)
    with pytest.raises(RewardError, match="19 prompts of 3 steps had .* equal rewards"):
        records.drawn_again(easy)


def test_prompts_of_which_a_policy_could_read_nothing_are_said_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = RunConfig(algorithm={"name": "sdpo", "draw_again": 1, "prompts_per_step": 1})
    records = Records(config, None, tmp_path, None, None, None, done=0, dtype="float32")
    hard = a_group()
    hard.rewards[:], hard.teacher_read = 0, [""] * len(hard.samples)
    records.drawn_again(hard)
    with pytest.raises(RewardError, match="had no sample that its teacher could read more of"):
        records.drawn_again(hard)


def test_with_lag_so_many_more_steps_are_filled_at_once(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = RunConfig(
        algorithm={"draw_again": 1, "prompts_per_step": 4, "correction": "tis"},
        schedule={"lag": 3},
        refit={"slots": 5},
    )
    records = Records(config, None, tmp_path, None, None, None, done=0, dtype="float32")
    easy = a_group()
    easy.rewards[:] = 1.0
    for _ in range(16):
        records.drawn_again(easy)
    with pytest.raises(RewardError, match="17 prompts of 4 steps had .* equal rewards"):
        records.drawn_again(easy)


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


def test_a_step_without_rewards_leaves_its_samples(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = RunConfig(logging={"run_dir": str(tmp_path / "run"), "samples_per_step": 1})
    group = a_group()
    group.rewards[:] = math.nan
    group.details.reasons[2] = "prompt 0: the judge is gone"
    with RunDir(config, resume=False) as run_dir:
        records = Records(config, None, tmp_path, run_dir, None, None, done=4, dtype="float32")
        records.keep_unrewarded(5, [group, group])
        kept = list(read_jsonl(run_dir.samples_file))
    assert len(kept) == 2 * SAMPLES and {one["step"] for one in kept} == {5}
    assert [one.get("failure") for one in kept[1:4]] == [None, "prompt 0: the judge is gone", None]
    assert kept[0]["reward"] is None and kept[0]["advantage"] is None


def test_what_environments_count_is_summed_over_the_step():
    groups = [a_group(), a_group()]
    assert environment_metrics(groups) == {}
    for group, turns in zip(groups, (7, 5), strict=True):
        group.counts = {"turns": turns, "done": 0}
    found = {"turns": 12, "done": 0, "conversations": 2 * SAMPLES}
    assert environment_metrics(groups) == {f"environment/{k}": v for k, v in found.items()}


def test_a_conversation_of_several_samples_counts_once(tmp_path):
    group = a_group()
    group.conversations = np.array([0, 0, 0, 0, 1, 2])
    group.counts = {"turns": 6}
    assert environment_metrics([group])["environment/conversations"] == 3
    group.rewards[4:] = math.nan
    group.failures[:] = ["prompt 0: raised"] * 2
    with pytest.raises(RewardError, match="2 of 3 rewards failed"):
        records_in(tmp_path).check_rewards([group])


def test_tokens_that_nobody_sampled_are_no_throughput():
    segments = a_group().samples[0].segments
    told = Sample((*segments, Segment.given("tool", [1, 1, 1]), segments[1]), "stop", "")
    found = rollout_metrics([told, told], seconds=2.0)
    assert (found["rollout/tokens"], found["rollout/tokens_per_second"]) == (8, 4.0)
    assert found["rollout/response_length"] == 7


def test_samples_of_several_versions_and_what_they_feed_again_are_counted():
    """Of five tokens; the second is cut after four of them, the third after two and after four."""

    def sample(versions, splits=()):
        parts = [Segment.sampled([7], np.zeros(1), version) for version in versions]
        parts.insert(1, Segment.given("tool", [1]))
        return Sample((Segment.given("user", [5]), *parts), "stop", "", splits=splits)

    samples = [sample([3, 3, 3]), sample([3, 3, 4], (4,)), sample([3, 4, 5], (2, 4))]
    assert continued_metrics(samples) == {
        "rollout/continued": 2,
        "rollout/spans_mean": 2.0,
        "rollout/spans_max": 3,
        "rollout/fed_again": (3 + 1 + 3) / 12,
    }
    assert continued_metrics([sample([3, 4, 5])])["rollout/fed_again"] == 0


def test_how_far_checkpoints_and_copies_are_behind(tmp_path):
    """A disk or a place for copies that refuses shows where nobody reads warnings."""
    records = records_in(tmp_path)
    records.checkpoints.newest, records.copied = 10, lambda: 5
    behind = {"checkpoint/steps_behind": 2, "checkpoint/copy_steps_behind": 7}
    assert records._behind(12) == behind
