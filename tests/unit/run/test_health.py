"""What a run says when it cannot learn."""

import numpy as np

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.config import RewardFunction
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import Details, Scores
from lora_moe_rl.rewards.combining import combine
from lora_moe_rl.run.health import REPEAT_STEPS, SAME_STEPS, Health, group_metrics


def group(*rewards, finish="stop"):
    segments = (Segment.given("user", [5]), Segment.sampled([7, 8], np.zeros(2), 0))
    samples = [Sample(segments, finish, "text") for _ in rewards]
    return Group(Prompt(0, "1+2=", [5]), samples, None, np.array(rewards, np.float32))


def look(health, step, *groups):
    """With the advantages of GRPO: a reward against the mean of its group."""
    signals = [
        Signal.of_samples(g, np.nan_to_num(g.rewards - np.nanmean(g.rewards))) for g in groups
    ]
    return health.look(step, groups, signals)


def test_groups_of_one_reward_are_counted():
    nan = float("nan")
    groups = [group(1, 1), group(0, 0), group(0, 1), group(1, nan), group(nan, nan)]
    assert group_metrics(groups) == {"reward/solved_all": 0.4, "reward/solved_none": 0.2}
    assert group_metrics([group(-1, -1)]) == {"reward/solved_all": 0, "reward/solved_none": 1}


def test_rewards_that_an_advantage_takes_for_equal_are_one_reward():
    """A judge's, which come with rounding: 0.7 and 0.7000005; and around 0."""
    groups = [group(0.7, 0.7000005), group(0, 5e-7), group(0.7, 0.71)]
    told = {"reward/solved_all": 1 / 3, "reward/solved_none": 1 / 3}
    assert group_metrics(groups, 1e-6) == told
    assert group_metrics(groups) == {"reward/solved_all": 0, "reward/solved_none": 0}
    equal = [Signal.of_samples(one, np.zeros(2)) for one in groups[:2]]
    (said,) = Health(1e-6).look(1, groups[:2], equal)
    assert "of 2 groups 50% have one same reward above 0" in said


def test_a_step_without_any_signal_is_told_of():
    health = Health()
    assert look(health, 1, group(0, 1), group(0, 0)) == []
    (told,) = look(health, 2, group(1, 1), group(0, 0), group(0, 0), group(0, 0))
    assert told.startswith("step 2: no group has an advantage, nothing is learned: of 4 groups 25%")
    assert "75% one of 0 or less" in told
    assert look(health, 3, group(0, 0)) == []  # said a step ago
    assert len(look(health, 2 + REPEAT_STEPS, group(0, 0), group(1, 1))) == 1


def test_where_there_was_no_room_to_read_that_is_said():
    one, other = group(1, 1), group(0, 0)
    one.teacher_read, other.teacher_read = ["too long", "too long"], ["", ""]
    (told,) = look(Health(), 1, one, other)
    assert "2 of 4 samples had no room for it in model.max_length" in told
    one.teacher_read = ["", ""]
    assert look(Health(), 1, one, other)[0].startswith("step 1: no group has an advantage")


def test_without_groups_the_advice_is_of_the_greedy_sample():
    (told,) = look(Health(greedy=True), 1, group(1), group(0))
    assert told.startswith("step 1: no sample has an advantage, nothing is learned: each has the")
    assert "group" not in told and "rollout.temperature" in told


def test_rewards_that_are_all_one_number_are_told_of():
    health = Health()
    told = [look(health, step, group(0.5, 0.5)) for step in range(1, SAME_STEPS + 1)]
    assert [len(one) for one in told] == [1, 0, 0, 0, 1]
    assert "every reward was 0.5" in told[-1][0] and "the last 5 steps" in told[-1][0]
    health = Health()
    for step in range(1, 20):
        told = look(health, step, group(0, 0) if step % SAME_STEPS else group(0, 1))
        assert not [one for one in told if "every reward" in one]


def test_samples_that_are_cut_off_are_told_of():
    cut = group(0, 1, finish="length")
    assert look(Health(), 1, cut, group(0, 1)) == []
    (told,) = look(Health(), 1, cut, cut, group(0, 1))
    assert "67% of the samples were cut off at rollout.max_response_tokens" in told


def scored(**functions):
    """A group of two samples; of each function its rewards, or why it failed for each of them."""
    every, given = [], []
    for name, values in functions.items():
        reasons = {i: value for i, value in enumerate(values) if isinstance(value, str)}
        rewards = np.array([np.nan if isinstance(v, str) else v for v in values], np.float32)
        weight = 0.0 if name == "judge" else 1.0
        every.append(RewardFunction(f"reward.functions.{name}.function", "m:f", {}, weight, name))
        given.append(Scores(rewards, list(reasons.values()), Details(reasons=reasons)))
    found = group(0, 1)
    found.rewards, found.failures, found.details = combine(every, given)
    return found


def test_one_of_several_functions_that_gives_nothing_is_told_of_once_with_its_last_error():
    """One of weight 0 too, whose failures stop no run."""
    nan, health = float("nan"), Health()
    good = scored(right=[0, 1], judge=[0.5, nan], never=[nan, nan])
    bad = scored(right=[0, 1], judge=["no answer", "HTTP 503"], never=[nan, nan])
    (told,) = look(health, 1, good, bad)  # the judge gave one sample a reward
    assert told.startswith("step 1: reward.functions.never gave none of 4 samples a reward: all N")
    (told,) = look(health, 2, bad, bad)
    assert "reward.functions.judge gave none of 4 samples a reward: it failed for 4" in told
    assert "the last: HTTP 503 (reward/judge/failed" in told
    assert look(health, 3, bad) == look(health, 3 + REPEAT_STEPS, bad) == []
    none = scored(right=[0, 1], judge=[nan, nan], never=[nan, nan])
    (told,) = look(health, 4, none)
    assert "reward.functions.judge gave none of 2 samples a reward: all None" in told
