"""On-policy distillation: what a teacher's logprobs become, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from packed_tokens import tokens_of
from torch.testing import assert_close

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.errors import ConfigError


def made(*settings: str):
    return algorithms.make(override(RunConfig(), ["algorithm=opd", *settings]))


def a_group(rewards, teacher) -> Group:
    """Samples of three tokens, the middle one a tool's, sampled at logprobs of -1 and -2."""
    prompt = Segment.given("user", [5])
    said = (Segment.sampled([7], np.array([-1.0]), 0), Segment.given("tool", [4]))
    sample = Sample((prompt, *said, Segment.sampled([8], np.array([-2.0]), 0)), "stop", "")
    given = [np.array(one, np.float32) for one in teacher]
    samples = [sample] * len(teacher)
    return Group(Prompt(0, "?", [5]), samples, None, np.array(rewards, np.float32), teacher=given)


def test_the_advantage_of_a_token_is_how_much_likelier_the_teacher_finds_it():
    group = a_group([0, 0], [[-0.25, 0, -4], [-1, 0, -2]])
    (signal,) = signals_of(made(), [group])
    np.testing.assert_allclose(signal.advantages, [[0.75, 0, -2], [0, 0, 0]])
    np.testing.assert_array_equal(signal.weights, [[1, 0, 1], [1, 0, 1]])


def test_a_sample_that_the_teacher_could_not_score_is_left_out():
    group = a_group([0, np.nan], [[-0.25, 0, -4], [0, 0, 0]])
    (signal,) = signals_of(made(), [group])
    np.testing.assert_array_equal(signal.weights, [[1, 0, 1], [0, 0, 0]])


def test_a_reward_comes_on_top_with_its_weight():
    rewards = [1.0, 0.0]
    teacher = [[-0.25, 0, -4], [-1, 0, -2]]
    alone, both = (
        signals_of(made(*settings), [a_group(rewards, teacher)])[0].advantages
        for settings in ((), ("algorithm.reward_weight=0.5",))
    )
    # (reward - 0.5) / sqrt(0.5) = 0.707107, whose half is added to the policy's tokens.
    for one, other, sign in zip(alone, both, (1, -1), strict=True):
        np.testing.assert_allclose(other - one, sign * 0.353553 * np.array([1, 0, 1]), atol=1e-5)
    assert made("algorithm.reward_weight=0.5").needs_reward and not made().needs_reward


def test_the_gradient_is_that_of_importance_sampling():
    """Of -exp(logprob - rollout) times the advantage, as long as the ratio is within its bound."""
    rollout = torch.tensor([-1.0, -2.0, -0.5, -9.0], dtype=torch.float64)
    logprobs = torch.tensor([-1.2, -1.1, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.75, -2.0, 0.1, 1.0], dtype=torch.float64)
    tokens = tokens_of(logprobs, logprobs.detach(), advantages, rollout=rollout)
    made().loss(tokens).values.sum().backward()
    ratio = (logprobs - rollout).exp()
    (wanted,) = torch.autograd.grad(-(ratio * advantages).sum(), logprobs)
    assert_close(logprobs.grad[:3], wanted[:3])
    assert_close(logprobs.grad[3].item(), -5.0)  # exp(7), cut off at algorithm.ratio_max


def test_no_teacher_is_no_zero():
    group = a_group([0], [[0, 0, 0]])
    group.teacher = None
    with pytest.raises(ValueError, match="prompt 0: no teacher has scored its samples"):
        signals_of(made(), [group])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["rollout.temperature=0.7"], "rollout.temperature=0.7: a teacher gives logprobs"),
        (["algorithm.draw_again=2"], "learns from them all the same"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], "take kl_in=loss"),
        (["algorithm.overlong_buffer=2"], "algorithm.reward_weight=0"),
        (["algorithm.normalize_std=false"], "algorithm.normalize_std=none has no effect"),
        (["algorithm.normalize_std=step"], "algorithm.normalize_std=step has no effect"),
        (["algorithm.reward_weight=1", "algorithm.group_size=1"], "group_size=1 leaves none"),
        (["algorithm.advantage=grpo", "algorithm.teacher_url=http://x/v1"], "teacher_url"),
    ],
)
def test_what_has_no_meaning_with_a_teacher_is_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        made(*settings)


def test_one_sample_a_prompt_is_enough():
    assert made("algorithm.group_size=1").teacher is not None
    assert algorithms.make(RunConfig()).teacher is None
