"""What an algorithm says of its groups before the trainer sees them."""

from dataclasses import replace

import numpy as np
import pytest

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.algorithms.rloo import RLOO
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.scores import FunctionRewards
from lora_moe_rl.errors import ConfigError

NAN = float("nan")


def made(**settings):
    return algorithms.make(RunConfig(algorithm=settings, rollout={"max_response_tokens": 20}))


def group_of(rewards, finish="stop", tool=0, lengths=None) -> Group:
    """Samples of three tokens, or of `lengths`; then `tool` tokens of a tool and one more of the
    policy."""
    samples = []
    for length in lengths or [3] * len(rewards):
        said = Segment.sampled([7] * length, np.zeros(length), 0)
        segments = [Segment.given("user", [5, 6]), said]
        if tool:
            segments.append(Segment.given("tool", [3] * tool))
            segments.append(Segment.sampled([4], np.zeros(1), 1))
        samples.append(Sample(tuple(segments), finish, ""))
    return Group(Prompt(0, "", [5, 6]), samples, None, np.array(rewards, np.float32))


def test_a_signal_leaves_out_what_has_no_reward_and_what_the_policy_did_not_write():
    (signal,) = signals_of(made(name="rloo"), [group_of([1.0, 0.0, NAN], tool=2)])
    assert [w.tolist() for w in signal.weights] == [[1, 1, 1, 0, 0, 1]] * 2 + [[0] * 6]
    assert [a[0] for a in signal.advantages] == [1, -1, 0]


def test_a_signal_has_the_rewards_exactly_when_advantages_are_to_be_revised():
    groups = [group_of([1.0, 0.0]), group_of([0.0, NAN])]
    for settings, expected in (
        ({"kl_coef": 0.1}, [[1, 0], [0, NAN]]),
        ({"kl_coef": 0.1, "kl_in": "loss"}, None),
        ({}, None),
    ):
        signals = signals_of(made(name="rloo", **settings), groups)
        batch = TrainBatch.from_groups(groups, signals, mini_batches=1, step=1)
        if expected is None:
            assert batch.rewards is None and signals[0].rewards is None
        else:
            np.testing.assert_array_equal(batch.rewards, np.concatenate(expected))


def test_truncated_samples_are_left_out_when_that_is_asked():
    group = group_of([1.0, 0.0], finish="length")
    (kept,) = signals_of(made(), [group])
    (left_out,) = signals_of(made(mask_truncated=True), [group])
    assert all(weight.all() for weight in kept.weights)
    assert not any(weight.any() for weight in left_out.weights)


def test_a_conversation_whose_end_was_cut_off_leaves_with_all_its_samples():
    """One that was cut off and gone on from leaves alone: the end that is rewarded was not."""
    group = forked([0.0, 0.0, 0.0, 1.0, 1.0, 0.5], [0, 0, 0, 1, 1, 2])
    for cut_off in (2, 3):
        group.samples[cut_off] = replace(group.samples[cut_off], finish_reason="length")
    (signal,) = signals_of(made(name="rloo", mask_truncated=True), [group])
    assert [bool(w.any()) for w in signal.weights] == [False] * 4 + [True] * 2
    (drawn,) = signals_of(
        made(mask_truncated=True, reweight="pow"), [group], np.random.default_rng(0)
    )
    assert drawn.copies is not None and drawn.copies[:3].tolist() == [0] * 3
    (kept,) = signals_of(made(name="rloo"), [group])
    assert all(weight.any() for weight in kept.weights)


def test_a_signal_of_another_shape_is_refused():
    class Short(RLOO):
        def signals(self, groups):
            return [
                type(signal)(signal.advantages, [w[1:] for w in signal.weights])
                for signal in super().signals(groups)
            ]

    rloo = made(name="rloo")
    with pytest.raises(ValueError, match=r"Short.signal returned weights of shapes"):
        signals_of(Short(rloo.settings, 20), [group_of([1.0, 0.0])])


def test_the_signals_of_a_step_are_those_of_its_groups():
    class Fewer(RLOO):
        def signals(self, groups):
            return super().signals(groups)[1:]

    groups = [group_of([1.0, 0.0]), group_of([0.0, 2.0, 1.0])]
    first, second = signals_of(made(name="rloo"), groups)
    assert [a[0] for a in first.advantages] == [1, -1]
    assert [a[0] for a in second.advantages] == [-1.5, 1.5, 0]
    with pytest.raises(ValueError, match="Fewer.signals returned 1 signals for 2 groups"):
        signals_of(Fewer(made(name="rloo").settings, 20), groups)


def test_a_reward_sinks_near_the_longest_response():
    # Of 20 tokens, the last 5: full reward up to 15, then a fifth of 0.5 less each token.
    algorithm = made(advantage="rloo", overlong_buffer=5, overlong_penalty=0.5)
    group = group_of([1.0, 1.0, 1.0, 1.0], lengths=[3, 15, 17, 20])
    (signal,) = signals_of(algorithm, [group])
    rewards = np.array([1.0, 1.0, 0.8, 0.5])
    expected = (rewards - rewards.mean()) * 4 / 3
    np.testing.assert_allclose([a[0] for a in signal.advantages], expected, rtol=1e-6)
    assert group.rewards.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 0], True), ([0.3, 0.3 + 1e-7], False), ([1, NAN], False), ([NAN, NAN], False)],
)
def test_a_group_has_a_signal_when_rewards_differ(rewards, expected):
    assert made().has_signal(group_of(rewards)) == expected


@pytest.mark.parametrize(("equal_within", "expected"), [(1e-6, True), (0.05, False), (0.0, True)])
def test_what_counts_as_equal_is_one_bound_for_drawing_again_and_for_advantages(
    equal_within, expected
):
    algorithm, group = made(equal_within=equal_within), group_of([0.30, 0.33, 0.34])
    (signal,) = signals_of(algorithm, [group])
    assert algorithm.has_signal(group) == expected
    assert any(advantage.any() for advantage in signal.advantages) == expected


def turns(reward_of_mask: list[bool]) -> Sample:
    """A sample in which the policy wrote the tokens where the mask is True, a tool the others."""
    segments = [Segment.given("user", [1])]
    for wrote in reward_of_mask:
        one = Segment.sampled([7], np.zeros(1), 0) if wrote else Segment.given("tool", [8])
        segments.append(one)
    return Sample(tuple(segments), "stop", "")


def test_what_a_tool_wrote_has_no_advantage_and_no_weight_whatever_an_algorithm_says():
    class Everything(RLOO):
        def signals(self, groups):
            return [
                type(s)([a + 5 for a in s.advantages], [np.ones_like(w) for w in s.weights])
                for s in super().signals(groups)
            ]

    masks = [[True, False, True], [True, True]]
    group = Group(Prompt(0, "", [1]), [turns(m) for m in masks], None, np.array([1.0, 0.0]))
    (signal,) = signals_of(Everything(made(name="rloo").settings, 20), [group])
    assert [a.tolist() for a in signal.advantages] == [[6, 0, 6], [4, 4]]
    assert [w.tolist() for w in signal.weights] == [[1, 0, 1], [1, 1]]


def forked(rewards: list[float], conversations: list[int]) -> Group:
    samples = [turns([True, False, True]) for _ in rewards]
    rewards, conversations = np.array(rewards, np.float32), np.array(conversations)
    return Group(Prompt(3, "", [1]), samples, None, rewards, conversations=conversations)


def test_a_conversation_of_several_samples_counts_once_and_all_get_its_advantage():
    """With every sample counted the baselines would be others."""
    group = forked([1.0, 1.0, 1.0, 0.0, 0.5], [0, 0, 0, 1, 2])
    (signal,) = signals_of(made(name="rloo"), [group])
    found = [a[0] for a in signal.advantages]
    np.testing.assert_allclose(found, [0.75, 0.75, 0.75, -0.75, 0.0])
    assert [w.tolist() for w in signal.weights] == [[1, 0, 1]] * 5
    assert [a[1] for a in signal.advantages] == [0] * 5


def test_the_trainer_is_told_which_samples_are_of_one_conversation():
    groups = [forked([1.0, 1.0, 0.0], [0, 0, 1]), group_of([1.0, 0.0]), forked([1.0, 0.0], [0, 1])]
    signals = signals_of(made(name="dr_grpo"), groups)
    batch = TrainBatch.from_groups(groups, signals, mini_batches=1, step=1)
    assert batch.conversations is not None
    assert batch.conversations.tolist() == [0, 0, 1, 2, 3, 4, 5]
    share = batch.share([0, 3], batch.known())
    assert share.conversations is not None and len(share.conversations) == 7
    alone = TrainBatch.from_groups(groups[1:2], signals[1:2], mini_batches=1, step=1)
    assert alone.conversations is None


def test_what_each_function_gave_a_conversation_of_several_samples_counts_once():
    """Else GDPO would normalize over samples, and not find the rewards to be the sums. What is
    whitened afterwards are tokens, of which the first conversation has three times as many."""
    rewards, once = [1.0, 1.0, 1.0, 0.0, 0.5], np.array([1.0, 0.0, 0.5])
    group = forked(rewards, [0, 0, 0, 1, 2])
    of_two = {"a": FunctionRewards(1.0, np.array(rewards, np.float32))}
    group.details.by_function.update(of_two, b=FunctionRewards(2.0, np.zeros(len(rewards))))
    (found,) = signals_of(made(advantage="gdpo"), [group])
    normal = (once - once.mean()) / (once.std(ddof=1) + 1e-6)
    tokens = np.repeat(normal, [6, 2, 2])
    white = (normal - tokens.mean()) / tokens.std(ddof=1)
    expected = np.repeat(white, [3, 1, 1])
    np.testing.assert_allclose([one[0] for one in found.advantages], expected, rtol=1e-6)


@pytest.mark.parametrize("advantage", ["reinforce_pp", "reinforce_pp_baseline", "opo"])
def test_what_goes_by_tokens_counts_those_of_all_samples_of_a_conversation(advantage):
    """All are in the loss; by hand of 6 tokens with a reward of 1 and 2 with one of 0."""
    group = forked([1.0, 1.0, 1.0, 0.0], [0, 0, 0, 1])
    (signal,) = signals_of(made(advantage=advantage), [group])
    each, weights = np.array([1.0, 0.0]), np.array([6, 2])
    mean = (each * weights).sum() / weights.sum()
    deviation = np.sqrt((weights * (each - mean) ** 2).sum() / (weights.sum() - 1))
    expected = (each - mean) / (1 if advantage == "opo" else deviation)
    found = [one[0] for one in signal.advantages]
    np.testing.assert_allclose(found, expected[[0, 0, 0, 1]], rtol=1e-6)


def test_the_longest_sample_of_a_conversation_is_punished_for_its_length():
    group = forked([1.0, 1.0, 0.0], [0, 0, 1])
    group.samples[0] = turns([True] * 18)
    buffered = made(name="rloo", overlong_buffer=4, overlong_penalty=1.0)
    (signal,) = signals_of(buffered, [group])
    assert [one[0] for one in signal.advantages] == pytest.approx([0.5, 0.5, -0.5])


@pytest.mark.parametrize("where", ["last", "all"])
def test_a_fork_whose_last_sample_has_no_token_of_the_policy(where):
    """The one before it stands for the conversation; where none has any, none is learned from."""
    group = forked([1.0, 1.0, 1.0, 0.0, 0.5], [0, 0, 0, 1, 2])
    (usual,) = signals_of(made(name="rloo"), [group])
    for i in (2,) if where == "last" else (0, 1, 2):
        group.samples[i] = turns([False, False, False])
    (found,) = signals_of(made(name="rloo"), [group])
    for i, (weight, advantage) in enumerate(zip(found.weights, found.advantages, strict=True)):
        if not group.samples[i].mask.any():
            assert not weight.any() and not advantage.any()
        else:
            np.testing.assert_array_equal(weight, usual.weights[i])
            np.testing.assert_array_equal(advantage, usual.advantages[i])


def test_a_fork_is_refused_where_a_conversation_has_no_one_advantage():
    class Rising(RLOO):
        def signals(self, groups):
            return [
                type(s)([np.arange(len(a), dtype=np.float32) for a in s.advantages], s.weights)
                for s in super().signals(groups)
            ]

    group = forked([1.0, 1.0, 0.0], [0, 0, 1])
    with pytest.raises(ConfigError, match="prompt 3: .* gives its tokens advantages of their own"):
        signals_of(Rising(made(name="rloo").settings, 20), [group])
    in_reward = made(name="rloo", kl_coef=0.1, kl_in="reward")
    with pytest.raises(ConfigError, match="prompt 3: .* revises its advantages by sample"):
        signals_of(in_reward, [group])
