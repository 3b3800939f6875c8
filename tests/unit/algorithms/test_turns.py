"""Rewards of turns: where they stand among a sample's tokens, and what advantages make of them,
worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.advantages.base import Rewarded
from lora_moe_rl.algorithms.base import Known
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.algorithms.parts.turns import earned_before_the_end, of_all
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.applicable import check_applicable
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import Details
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.sample_records import sample_record
from lora_moe_rl.run.reward_metrics import reward_metrics, turn_metrics


def policy(tokens: int, version: int = 0) -> Segment:
    return Segment.sampled([7] * tokens, np.zeros(tokens, np.float32), version)


def sample(*segments: Segment) -> Sample:
    return Sample((Segment.given("user", [1, 2]), *segments), "stop", "")


TOOL = Segment.given("tool", [5, 5])
# Three turns, of which another version went on with the second: 2, 3 and 1 tokens.
TALK = sample(policy(2), TOOL, policy(2), policy(1, 1), TOOL, policy(1))
SHORT = sample(policy(3))


def group(samples, rewards, by_turn) -> Group:
    details = Details(by_turn=by_turn)
    return Group(Prompt(0, "", [1, 2]), samples, None, np.array(rewards, np.float32), [], details)


def test_a_turn_ends_where_another_author_goes_on():
    assert TALK.turn_ends.tolist() == [1, 6, 9]
    assert SHORT.turn_ends.tolist() == [2]
    assert sample(TOOL, policy(1)).turn_ends.tolist() == [2]


def test_each_turn_but_the_last_has_its_reward_at_its_last_token():
    (first, second) = earned_before_the_end(group([TALK, SHORT], [1, 0], {0: [0.5, -0.25, 0.75]}))
    assert first.tolist() == [0, 0.5, 0, 0, 0, 0, -0.25, 0, 0, 0]
    assert second.tolist() == [0, 0, 0]
    assert earned_before_the_end(group([TALK], [1], {})) is None
    assert of_all([group([TALK], [1], {}), group([SHORT], [1], {})]) is None
    every = of_all([group([SHORT], [1], {}), group([TALK], [1], {0: [1, 0, 0]})])
    assert [one.sum() for one in every] == [0, 1]


def test_what_a_turn_earned_that_is_not_in_the_loss_is_not_lost():
    """It stands at the end of the turn before; of the first, at the first token that there is."""
    left_out = replace(TOOL, author="policy")
    talk = sample(policy(2), TOOL, left_out, TOOL, policy(1))
    (found,) = earned_before_the_end(group([talk], [1], {0: [0.25, 0.5, 0.25]}))
    assert found.tolist() == [0, 0.75, 0, 0, 0, 0, 0, 0, 0]
    talk = sample(left_out, TOOL, policy(2))
    (found,) = earned_before_the_end(group([talk], [1], {0: [0.5, 0.5]}))
    assert found.tolist() == [0, 0, 0, 0, 0.5, 0]


def rewarded(reward: float, earlier) -> Rewarded:
    return Rewarded(np.array([reward]), np.zeros(1, int), [TALK.mask], earlier=earlier)


def test_the_rest_of_a_reward_is_earned_at_the_end():
    earlier = earned_before_the_end(group([TALK], [1], {0: [0.5, -0.25, 0.75]}))
    (found,) = rewarded(1.0, earlier).of_tokens()
    assert found.tolist() == [0, 0.5, 0, 0, 0, 0, -0.25, 0, 0, 0.75]
    # A soft punishment of 0.5 takes from the end.
    (found,) = rewarded(0.5, earlier).of_tokens()
    assert found.tolist() == [0, 0.5, 0, 0, 0, 0, -0.25, 0, 0, 0.25]
    (found,) = rewarded(np.nan, earlier).of_tokens()
    assert not found.any()


def advantages(*settings: str, by_turn) -> list[list[float]]:
    """Of the talk, reward 1, and of a short sample, reward 0."""
    algorithm = algorithms.make(override(RunConfig(), [*settings]))
    found = signals_of(algorithm, [group([TALK, SHORT], [1, 0], by_turn)])
    return [one.tolist() for one in found[0].advantages]


def whitened(values: list[float]) -> np.ndarray:
    every = np.array(values)
    return (every - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8)


def test_an_advantage_that_looks_ahead_gives_a_token_what_is_earned_after_it():
    """REINFORCE++ with a discount of 1/2 a token of the policy: of 2, 3, 1 tokens and of 3."""
    settings = ("algorithm=reinforce_pp", "algorithm.gamma=0.5")
    talk, short = advantages(*settings, by_turn={0: [0.5, 0.25, 0.25]})
    after = [0.25]
    for reward in (0.25, 0, 0, 0.5, 0):
        after.insert(0, reward + 0.5 * after[0])
    wanted = whitened([*after, 0, 0, 0])
    inside = np.array(talk)[TALK.mask]
    np.testing.assert_allclose([*inside, *short], wanted, rtol=1e-6)
    assert not np.array(talk)[~TALK.mask].any()
    at_the_end = advantages(*settings, by_turn={})[0]
    assert np.abs(np.array(talk) - at_the_end).max() > 0.5


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo"])
def test_an_advantage_of_whole_samples_takes_their_sum(name):
    some, none = (advantages(f"algorithm={name}", by_turn=one) for one in ({0: [1, 0, 0]}, {}))
    assert some == none


def test_a_critics_advantages_and_returns_are_of_them_on_every_rank():
    """gae with gamma and lambda 1 and values of 0: the reward to come."""
    config = override(RunConfig(), ["algorithm=ppo"])
    algorithm = algorithms.make(config)
    groups = [group([TALK, SHORT], [1, 0], {0: [0.5, 0.25, 0.25]}), group([SHORT], [1], {})]
    batch = TrainBatch.from_groups(groups, signals_of(algorithm, groups), 1, step=1)
    assert [one.sum() for one in batch.earlier] == [0.75, 0, 0]
    share = batch.share([1], batch.known(), masks=True)
    assert [one.tolist() for one in share.earlier] == [one.tolist() for one in batch.earlier]
    values = [np.zeros(len(mask)) for mask in batch.masks]
    known = Known(batch.rewards, batch.groups, batch.masks, values=values, earlier=batch.earlier)
    talk, short, right = (one.tolist() for one in algorithm.returns(known))
    assert np.array(talk)[TALK.mask].tolist() == [1, 1, 0.5, 0.5, 0.5, 0.25]
    assert short == [0, 0, 0] and right == [1, 1, 1]


def test_a_batch_without_them_knows_none():
    algorithm = algorithms.make(override(RunConfig(), ["algorithm=ppo"]))
    groups = [group([TALK, SHORT], [1, 0], {})]
    assert TrainBatch.from_groups(groups, signals_of(algorithm, groups), 1, step=1).earlier is None


def test_the_share_of_samples_of_which_it_is_told_is_recorded_where_it_is():
    groups = [group([TALK, SHORT], [1, 0], {0: [1, 0.5, -0.5]}), group([SHORT, SHORT], [1, 0], {})]
    assert turn_metrics(groups) == {"reward/by_turn": 0.25, "reward/before_last_turn": 1.5}
    assert turn_metrics(groups[1:]) == {}
    record = sample_record(1, groups[0], None, 0)
    assert record["turn_rewards"] == [1, 0.5, -0.5]
    assert "turn_rewards" not in sample_record(1, groups[0], None, 1)


PAIR = sample(policy(1), TOOL, policy(2))  # two turns
BY_TURN = ("algorithm.advantage=turns", "environment=tools")


def compared(samples, rewards, by_turn, *settings: str) -> list[list[float]]:
    """The advantage of each turn of the samples of one group; all its tokens have it."""
    algorithm = algorithms.make(override(RunConfig(), [*BY_TURN, *settings]))
    (found,) = signals_of(algorithm, [group(samples, rewards, by_turn)])
    turns = []
    for one, advantages in zip(samples, found.advantages, strict=True):
        assert not advantages[~one.mask].any()
        each = [{*advantages[one.mask & (one.turn_of == turn)].tolist()}
                for turn in range(len(one.turn_ends))]  # fmt: skip
        assert all(len(values) <= 1 for values in each)
        turns.append([values.pop() if values else None for values in each])
    return turns


def test_a_token_knows_its_turn():
    assert TALK.turn_of[TALK.mask].tolist() == [0, 0, 1, 1, 1, 2]
    assert SHORT.turn_of.tolist() == [0, 0, 0]


def test_each_turn_is_compared_with_the_same_turn_of_the_others():
    """Returns with a discount of 1/2 a turn: of 1, 0 and 4, 1 + (0 + 4/2)/2 = 2, 2 and 4; of 0
    and 2, 1 and 2; of 0 alone 0. First turns: mean 1, deviation 1; second turns: of 2 and 2, all
    the same; a third turn only one has."""
    given = [TALK, PAIR, SHORT], [5, 2, 0], {0: [1, 0, 4], 1: [0, 2]}
    found = compared(*given, "algorithm.turn_gamma=0.5")
    np.testing.assert_allclose(found[0], [1, 0, 0], atol=2e-6)
    np.testing.assert_allclose(found[1], [0, 0], atol=2e-6)
    np.testing.assert_allclose(found[2], [-1], atol=2e-6)
    # Without a discount: 5, 4, 4; 2, 2; 0. Means 7/3 and 3.
    found = compared(*given, "algorithm.normalize_std=none")
    np.testing.assert_allclose(found[0], [8 / 3, 1, 0], rtol=1e-6)
    np.testing.assert_allclose(found[1], [-1 / 3, -1], rtol=1e-6)
    np.testing.assert_allclose(found[2], [-7 / 3], rtol=1e-6)


def test_of_which_nothing_is_told_a_sample_has_earned_its_reward_at_the_end():
    """With no discount each turn then has what the whole sample has, among those that have it."""
    found = compared([TALK, PAIR, SHORT], [1, 0, 0], {}, "algorithm.normalize_std=none")
    np.testing.assert_allclose(found[0], [2 / 3, 1 / 2, 0], rtol=1e-6)
    np.testing.assert_allclose(found[1], [-1 / 3, -1 / 2], rtol=1e-6)


def test_a_sample_without_a_reward_and_a_turn_out_of_the_loss_are_compared_with_nothing():
    left_out = replace(TOOL, author="policy")
    talk = sample(policy(1), TOOL, left_out, TOOL, policy(1))
    by_turn = {0: [0, 1, 1], 1: [0, 0, 0], 2: [5, 5, 5], 3: [2, 0, 0]}
    found = compared([TALK, TALK, TALK, talk], [2, 0, np.nan, 2], by_turn,
                     "algorithm.normalize_std=none")  # fmt: skip
    np.testing.assert_allclose(found[0], [2 / 3, 1, 2 / 3], rtol=1e-6)
    np.testing.assert_allclose(found[1], [-4 / 3, -1, -1 / 3], rtol=1e-6)
    assert found[2] == [0, 0, 0] and found[3][1] is None
    np.testing.assert_allclose([found[3][0], found[3][2]], [2 / 3, -1 / 3], rtol=1e-6)


def test_groups_are_compared_by_themselves_and_one_whose_turns_differ_has_a_signal():
    algorithm = algorithms.make(override(RunConfig(), [*BY_TURN]))
    even = group([TALK, TALK], [1, 1], {0: [1, 0, 0], 1: [0, 0, 1]})
    other = group([TALK, TALK], [1, 1], {0: [0, 1, 0], 1: [0, 1, 0]})
    assert algorithm.has_signal(even) and not algorithm.has_signal(other)
    none = group([TALK, TALK], [np.nan, np.nan], {})
    assert not algorithm.has_signal(none)
    one, two, _ = signals_of(algorithm, [even, other, none])
    half = 1 / np.sqrt(2)
    first = [advantages[mask][0] for advantages, mask in
             zip(one.advantages, [TALK.mask] * 2, strict=True)]  # fmt: skip
    np.testing.assert_allclose(first, [0, 0], atol=2e-6)  # from the first turn on both have 1
    assert one.advantages[0][4] == pytest.approx(-half, rel=1e-5)
    assert not np.concatenate(two.advantages).any()


def test_turns_that_none_is_compared_with_are_counted():
    config = override(RunConfig(), [*BY_TURN])
    groups = [group([TALK, PAIR, SHORT], [1, 0, 0], {}), group([TALK, SHORT], [1, np.nan], {})]
    assert reward_metrics(groups, config)["reward/turns_alone"] == pytest.approx(4 / 9)
    left_out = sample(policy(1), TOOL, replace(TOOL, author="policy"), TOOL, policy(1))
    found = reward_metrics([group([TALK, left_out], [1, 0], {})], config)
    assert (found["reward/turns_alone"], found["reward/turns_alike"]) == (1 / 5, 5 / 3)
    assert "reward/turns_alone" not in reward_metrics(groups, RunConfig())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["environment=single_turn"], "environment=single_turn every sample is one turn"),
        (["algorithm.loss=gmpo"], "loss=gmpo takes their mean over the sample; .* ppo_clip or"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], "is known; take kl_in=loss"),
        (["algorithm.normalize_std=step"], "turns compares turns; take group or none"),
        (["algorithm.group_size=1"], "group_size=1 leaves none to compare with"),
        (["algorithm=ppo"], "advantage=turns does not read its values"),
    ],
)
def test_what_makes_no_sense_with_turns_is_refused_by_name(settings, told):
    with pytest.raises(ConfigError, match=told):
        check_applicable(override(RunConfig(), [*BY_TURN, *settings]))
