"""Samples drawn once more by their rewards; verl's weights are compared in test_oracles.py."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.reweight import draw
from lora_moe_rl.algorithms.parts.step_signals import revised, signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.errors import ConfigError

NAN = float("nan")


def made(**settings):
    return algorithms.make(RunConfig(algorithm=settings, rollout={"max_response_tokens": 20}))


def group_of(rewards, truncated=(), lengths=None, conversations=None) -> Group:
    samples = []
    for i, length in enumerate(lengths or [3] * len(rewards)):
        segments = (
            Segment.given("user", [5, 6]),
            Segment.sampled([7] * length, np.zeros(length), 0),
        )
        samples.append(Sample(segments, "length" if i in truncated else "stop", ""))
    rewards = np.array(rewards, np.float32)
    if conversations is not None:
        conversations = np.array(conversations)
    return Group(Prompt(0, "", [5, 6]), samples, None, rewards, conversations=conversations)


def draws(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_as_many_are_drawn_as_have_a_reward_and_only_they():
    rewards = np.array([1.0, NAN, 2.0, -3.0, NAN])
    for seed in range(20):
        copies = draw(rewards, "pow", 2.0, draws(seed))
        assert copies.sum() == 3 and copies[1] == copies[4] == 0 and copies.min() >= 0
    assert draw(np.full(3, NAN), "max_min", 2.0, draws()).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("how", "shares"),
    [
        ("pow", [0.0, 1 / 14, 4 / 14, 9 / 14, 0.0]),
        ("max_min", [0.0, 0.0, 0.5, 0.5, 0.0]),
        ("max_random", [0.125, 0.125, 0.5, 0.125, 0.125]),
    ],
)
def test_samples_are_drawn_as_often_as_their_rewards_say(how, shares):
    rewards = np.array([0.0, -1.0, 2.0, -3.0, 0.0])
    generator = draws()
    counts = sum(draw(rewards, how, 2.0, generator) for _ in range(20_000))
    np.testing.assert_allclose(counts / counts.sum(), shares, atol=0.005)


def test_rewards_of_0_alone_are_drawn_alike():
    generator = draws()
    counts = sum(draw(np.zeros(4), "pow", 2.0, generator) for _ in range(10_000))
    np.testing.assert_allclose(counts / counts.sum(), 0.25, atol=0.01)


def test_a_sample_that_is_not_drawn_leaves_the_loss_and_advantages_are_of_all():
    groups = [group_of([1.0, 0.0]), group_of([3.0, 3.5, 0.5])]
    plain = signals_of(made(), groups)
    found = signals_of(made(reweight="max_min"), groups, draws())
    copies = np.concatenate([signal.copies for signal in found])
    assert copies.sum() == 5 and copies[[0, 2, 4]].sum() == 0  # neither 0 nor 3.5
    assert copies[1] > 0 and copies[3] > 0
    for one, other in zip(found, plain, strict=True):
        for a, b in zip(one.advantages, other.advantages, strict=True):
            assert a.tolist() == b.tolist() and a.any()
        assert [bool(w.any()) for w in one.weights] == [bool(c) for c in one.copies]
        assert all(set(w.tolist()) <= {0.0, 1.0} for w in one.weights)


def test_it_comes_to_the_trainer_and_survives_a_revision_of_the_advantages():
    groups = [group_of([1.0, 0.0]), group_of([3.0, 3.5, 0.5])]
    signals = signals_of(made(name="ppo", reweight="pow"), groups, draws())
    batch = TrainBatch.from_groups(groups, signals, mini_batches=1, step=1)
    copies = np.concatenate([signal.copies for signal in signals])
    assert batch.copies.tolist() == copies.tolist() and copies.max() > 1
    again = revised(signals, [np.full(3, 9.0)] * 5)
    assert [signal.copies.tolist() for signal in again] == [s.copies.tolist() for s in signals]
    plain = TrainBatch.from_groups(groups, signals_of(made(), groups), mini_batches=1, step=1)
    assert plain.copies.tolist() == [1] * 5


def test_what_is_not_in_the_loss_is_not_drawn():
    """One without a reward, and with mask_truncated=true one that was cut off."""
    group = group_of([5.0, NAN, 1.0, 1.0], truncated=[0])
    for seed in range(10):
        (signal,) = signals_of(made(reweight="pow", mask_truncated=True), [group], draws(seed))
        assert signal.copies[:2].tolist() == [0, 0] and signal.copies.sum() == 2
    (signal,) = signals_of(made(reweight="pow"), [group], draws())
    assert signal.copies.sum() == 3 and signal.copies[0] > 0


def test_the_soft_punishment_counts():
    """Of 20 tokens the last 5: the longest sample's reward of 1 is 0, and it is hardly drawn."""
    algorithm = made(reweight="pow", overlong_buffer=5)
    group = group_of([1.0, 1.0, 1.0], lengths=[3, 20, 3])
    (signal,) = signals_of(algorithm, [group], draws())
    assert signal.copies[1] == 0 and signal.copies.sum() == 3


def test_all_samples_of_a_conversation_stand_as_often_as_it_was_drawn():
    group = group_of([2.0, 2.0, 2.0, 0.0, 1.0], conversations=[0, 0, 0, 1, 2])
    for seed in range(10):
        (signal,) = signals_of(made(reweight="pow"), [group], draws(seed))
        assert set(signal.copies[:3].tolist()) == {signal.copies[0]}
        assert signal.copies[[0, 3, 4]].sum() == 3
        assert [bool(w.any()) for w in signal.weights] == [bool(c) for c in signal.copies]


def test_a_draw_has_to_be_given_what_it_draws_by():
    with pytest.raises(ValueError, match="nothing to draw them by"):
        signals_of(made(reweight="pow"), [group_of([1.0, 0.0])])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ["algorithm.reweight_power=3"],
            ["reweight_power=3 has no effect", "algorithm.reweight=null", "reweight=pow"],
        ),
        (
            ["algorithm.reweight=max_min", "algorithm.reweight_power=3"],
            ["reweight_power=3 has no effect with algorithm.reweight=max_min"],
        ),
        (
            ["algorithm=opd", "algorithm.reweight=pow"],
            ["algorithm.reweight=pow draws samples by rewards", "algorithm.reward_weight=0"],
        ),
        (
            ["algorithm=sft", "algorithm.reweight=pow"],
            ["algorithm.reweight=pow has no effect with algorithm=sft"],
        ),
        (["algorithm.reweight=best"], ["algorithm.reweight", "'max_random'"]),
        (["algorithm.reweight=pow", "algorithm.reweight_power=0"], ["algorithm.reweight_power"]),
        (["algorithm.use_pf_ppo=true"], ["here it is algorithm.reweight (pow, max_min"]),
    ],
)
def test_what_has_no_meaning_is_refused_with_both_sides(words, parts):
    with pytest.raises(ConfigError) as caught:
        override(RunConfig(), words)
    assert all(part in str(caught.value) for part in parts), caught.value
