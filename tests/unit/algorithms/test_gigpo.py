"""Turns in the same state: which state a turn begins in, and what algorithm.advantage=gigpo makes
of it, worked out by hand and by verl-agent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.applicable import check_applicable
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import Details
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.sample_records import sample_record
from lora_moe_rl.run.reward_metrics import reward_metrics

BY_STATE = ("algorithm.advantage=gigpo", "environment=tools")
NAN = float("nan")


def policy(tokens: int = 2, version: int = 0) -> Segment:
    return Segment.sampled([7] * tokens, np.zeros(tokens, np.float32), version)


def sample(*segments: Segment, states=()) -> Sample:
    return Sample((Segment.given("user", [1, 2]), *segments), "stop", "", states=states)


def walk(shown: str) -> Sample:
    """A turn of two tokens after each letter. The first stands for the prompt; any other is shown
    as a tool's answer of a token."""
    parts = [segment for letter in shown[1:]
             for segment in (Segment.given("tool", [ord(letter)]), policy())]  # fmt: skip
    return Sample((Segment.given("user", [ord(shown[0])]), policy(), *parts), "stop", "")


def group(walks, rewards=None) -> Group:
    """Of each walk its letters and what each of its turns has earned; `rewards`, where they are not
    the sum."""
    turns = {i: list(earned) for i, (_, earned) in enumerate(walks)}
    rewards = [sum(earned) for _, earned in walks] if rewards is None else rewards
    samples = [one if isinstance(one, Sample) else walk(one) for one, _ in walks]
    rewards = np.array(rewards, np.float32)
    return Group(Prompt(0, "", [1]), samples, None, rewards, [], Details(by_turn=turns))


def advantages(groups, *settings: str) -> list[list[float]]:
    """The advantage of each turn of all samples; all its tokens have it, and no other token has
    any."""
    algorithm = algorithms.make(override(RunConfig(), [*BY_STATE, *settings]))
    found = []
    for one, signal in zip(groups, signals_of(algorithm, groups), strict=True):
        for own, values in zip(one.samples, signal.advantages, strict=True):
            assert not values[~own.mask].any()
            each = [{*values[own.mask & (own.turn_of == turn)].tolist()}
                    for turn in range(len(own.turn_ends))]  # fmt: skip
            assert all(len(several) <= 1 for several in each)
            found.append([several.pop() if several else None for several in each])
    return found


def assert_turns(found, wanted, **tolerance) -> None:
    for own, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, expected, **tolerance)


def test_a_turn_begins_in_what_was_shown_before_it():
    """Tokens of others since the turn before, whoever wrote them and in however many parts; what
    the policy wrote, and which version went on with it, does not count."""
    tool = Segment.given("tool", [5, 6])
    one = sample(policy(), tool, policy(1), policy(1, 1), Segment.given("user", [5]),
                 Segment.given("tool", [6]), policy(3))  # fmt: skip
    assert len(one.turn_states) == len(one.turn_ends) == 3
    first, second, third = one.turn_states
    assert second == third != first
    other = sample(policy(9, 4), tool, policy())
    assert other.turn_states == [first, second]
    assert sample(tool, policy()).turn_states[0] not in (first, second)
    assert sample(policy(), Segment.given("tool", [6, 5]), policy()).turn_states[1] != second


def test_a_state_that_is_told_counts_instead():
    tool = Segment.given("tool", [5])
    turns = policy(), tool, policy(), tool, policy()
    shown = sample(*turns).turn_states
    assert sample(*turns, states=("hall", None, "")).turn_states == ["hall", shown[1], ""]
    for states in (("hall",), ("hall",) * 4):
        with pytest.raises(ValueError, match="states of . turns, and the policy has had 3"):
            _ = sample(*turns, states=states).turn_states
    one = group([(sample(*turns, states=("hall", None, "")), [1, 0, 0])])
    assert sample_record(1, one, None, 0)["turn_states"] == ["hall", None, ""]
    assert "turn_states" not in sample_record(1, group([("ab", [1, 0])]), None, 0)


def test_by_hand():
    """Rewards 3, 1 and 2 are 1, -1 and 0 from their mean, their deviation is 1.

    Returns with 1/2 a turn: of 0, 2, 1, 0 + (2 + 1/2)/2 = 1.25, 2.5 and 1; of 1 and 0 1 and 0; of
    2 alone 2. In a begin turns of 1.25, 1 and 2: mean 17/12. In b, to which the first walk comes
    back, 2.5, 1 and 0: mean 7/6."""
    walks = [("abb", [0, 2, 1]), ("ab", [1, 0]), ("a", [2])]
    settings = "algorithm.turn_gamma=0.5", "algorithm.normalize_std=none"
    found = advantages([group(walks)], *settings)
    wanted = [[1 - 2 / 12, 1 + 8 / 6, 1 - 1 / 6], [-1 - 5 / 12, -1 - 7 / 6], [7 / 12]]
    assert_turns(found, wanted, rtol=1e-6)
    # With twice the weight, and another discount: none, so that b has 3, 1, 0 and a has 3, 1, 2.
    found = advantages([group(walks)], "algorithm.turn_gamma=1", *settings[1:],
                       "algorithm.step_advantage_w=2")  # fmt: skip
    wanted = [[1 + 2, 1 + 10 / 3, 1 - 2 / 3], [-1 - 2, -1 - 8 / 3], [0]]
    assert_turns(found, wanted, rtol=1e-6, atol=1e-6)


# What verl-agent's own functions (gigpo/core_gigpo.py, at commit d0b97244c50f) made of these walks
# with gamma 0.95, in float64, run outside the project: episode_norm_reward with
# compute_mean_std_cross_steps=False plus the weight times step_norm_reward of build_step_group, of
# compute_step_discounted_returns.
UNEVEN = [
    [("abac", [0, 0.5, -0.25, 1]), ("abb", [0, 0, 0.5]), ("ad", [0, 0])],
    [("ab", [0, 1]), ("ab", [0.5, -0.5])],
]
OF_UNEVEN = {
    (): [
        [2.230084, 2.213733, 1.352104, 1.059624],
        [-0.376906, -0.741448, -0.677567],
        [-2.145658, -0.927171],
        [1.414211, 1.414212],
        [-1.414211, -1.414212],
    ],
    ("algorithm.normalize_std=none", "algorithm.step_advantage_w=0.5"): [
        [0.937792, 0.8925, 0.734417, 0.666667],
        [-0.139958, -0.2025, -0.19],
        [-0.865583, -0.583333],
        [0.73125, 0.875],
        [-0.73125, -0.875],
    ],
}
# compute_gigpo_outcome_advantage as a whole (mode mean_norm, step_advantage_w 0.5), which counts a
# sample's reward once for each of its turns: the same where all samples have as many.
EVEN = [
    [("aba", [0, 0.5, 0.25]), ("abb", [0, 0, 0.5]), ("acb", [0.25, 0, -0.5])],
    [("aab", [0, 1, 0]), ("abc", [0.5, 0, -0.25])],
]
OF_EVEN = [
    [0.616901, 0.633854, 0.391589],
    [0.242214, 0.252604, 0.265104],
    [-0.834036, -0.583333, -0.984896],
    [0.479271, 0.504271, 0.434375],
    [-0.608542, -0.434375, -0.375],
]


@pytest.mark.parametrize("settings", OF_UNEVEN)
def test_it_is_verl_agents(settings):
    found = advantages([group(walks) for walks in UNEVEN], *settings)
    assert_turns(found, OF_UNEVEN[settings], rtol=1e-5, atol=1e-6)


def test_it_is_verl_agents_whole_function_where_samples_have_as_many_turns():
    settings = "algorithm.normalize_std=none", "algorithm.step_advantage_w=0.5"
    found = advantages([group(walks) for walks in EVEN], *settings)
    assert_turns(found, OF_EVEN, rtol=1e-5, atol=1e-6)


def test_where_every_state_is_one_turns_alone_it_is_grpo():
    """But for the first, in which all begin: without a discount that counts as the sample does."""
    walks = [("abc", [0, 0, 1]), ("ade", [0, 0, 0]), ("afg", [0, 0, 0])]
    found = advantages([group(walks)], "algorithm.turn_gamma=1", "algorithm.normalize_std=none")
    assert_turns(found, [[4 / 3, 2 / 3, 2 / 3], *[[-2 / 3, -1 / 3, -1 / 3]] * 2], rtol=1e-6)


def test_a_sample_without_a_reward_and_a_turn_out_of_the_loss_are_compared_with_nothing():
    """In b begin turns of 1 and 0; in a of 1, 0 and 0."""
    out = replace(Segment.given("tool", [7]), author="policy")
    tool = Segment.given("tool", [ord("b")])
    left = Sample((Segment.given("user", [ord("a")]), policy(), tool, out), "stop", "")
    walks = [("ab", [0, 1]), ("ab", [0, 0]), ("ab", [5, 5]), (left, [0, 0])]
    found = advantages([group(walks, [1, 0, NAN, 0])], "algorithm.turn_gamma=1",
                       "algorithm.normalize_std=none")  # fmt: skip
    third = 1 / 3
    assert_turns(found[:2], [[4 * third, 2 * third + 0.5], [-2 * third, -third - 0.5]], rtol=1e-6)
    assert found[2] == [0, 0] and found[3][1] is None
    assert found[3][0] == pytest.approx(-2 * third)


def test_a_group_of_equal_rewards_has_a_signal_where_its_states_tell_turns_apart():
    algorithm = algorithms.make(override(RunConfig(), [*BY_STATE]))
    early, late = ("ab", [1, 0]), ("ab", [0, 1])
    assert algorithm.has_signal(group([early, late]))
    assert not algorithm.has_signal(group([early, early]))
    assert not algorithm.has_signal(group([("ab", [NAN, 0]), ("ab", [0, 0])], [NAN, NAN]))


def test_how_many_turns_share_a_state_is_recorded():
    """In the first group a has two turns, b three, c one; the sample without a reward does not
    count. In the second a has one."""
    groups = [group([("abb", [1, 0, 0]), ("abc", [0, 0, 0]), ("cc", [0, 0])], [1, 0, NAN]),
              group([("a", [0])])]  # fmt: skip
    found = reward_metrics(groups, override(RunConfig(), [*BY_STATE]))
    assert found["reward/turns_alone"] == pytest.approx(2 / 7)
    assert found["reward/turns_alike"] == pytest.approx(7 / 4)
    by_turn = override(RunConfig(), [*BY_STATE, "algorithm.advantage=turns"])
    found = reward_metrics(groups, by_turn)
    assert found["reward/turns_alone"] == pytest.approx(1 / 7)
    assert found["reward/turns_alike"] == pytest.approx(7 / 4)
    assert "reward/turns_alike" not in reward_metrics(groups, RunConfig())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["environment=single_turn"], "environment=single_turn every sample is one turn"),
        (["algorithm.loss=gmpo"], "loss=gmpo takes their mean over the sample"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], "is known; take kl_in=loss"),
        (["algorithm.normalize_std=step"], "advantage=gigpo compares turns; take group or none"),
        (["algorithm.group_size=1"], "group_size=1 leaves none to compare with"),
        (["algorithm=ppo"], "advantage=gigpo does not read its values"),
        (["algorithm.step_advantage_w=0"], "step_advantage_w"),
    ],
)
def test_what_makes_no_sense_with_states_is_refused_by_name(settings, told):
    with pytest.raises(ConfigError, match=told):
        check_applicable(override(RunConfig(), [*BY_STATE, *settings]))
