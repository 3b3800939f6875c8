"""Distillation from a teacher's likeliest tokens: what becomes of a group, and what is refused. The
divergence and its gradient are compared with TRL's in `tests/unit/trainer/test_taught_head.py`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from packed_tokens import tokens_of
from torch.testing import assert_close

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import pack
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.data.top import Top
from lora_moe_rl.errors import ConfigError


def made(*settings: str):
    return algorithms.make(override(RunConfig(), ["algorithm=distillation", *settings]))


def a_group(rewards) -> Group:
    """Samples of three tokens, the middle one a tool's; the teacher's two likeliest are numbered by
    sample and place."""
    prompt = Segment.given("user", [5, 6])
    said = (Segment.sampled([7], np.array([-1.0]), 0), Segment.given("tool", [4]))
    sample = Sample((prompt, *said, Segment.sampled([8], np.array([-2.0]), 0)), "stop", "")
    numbers = [np.array([[10 * i + 1, 10 * i], [3, 10 * i + 2], [4, 5]], np.int32) for i in (0, 1)]
    likeliest = [Top(ids, -ids.astype(np.float32)) for ids in numbers]
    teacher = [np.array([-0.5, 0, -1], np.float32)] * 2
    samples, rewards = [sample] * 2, np.array(rewards, np.float32)
    prompt = Prompt(0, "?", [5, 6])
    return Group(prompt, samples, None, rewards, teacher=teacher, likeliest=likeliest)


def test_the_likeliest_tokens_stand_where_the_response_is_predicted():
    group = a_group([0, np.nan])
    signals = signals_of(made(), [group])
    batch = TrainBatch.from_groups([group], signals, 1, 1)
    packed = pack(batch, [1, 0], 4)
    # Each sample feeds 5 - 1 tokens, and the last three places predict its response.
    none = [0, 0]
    wanted = [none, [11, 10], [3, 12], [4, 5], none, [1, 0], [3, 2], [4, 5]]
    ids, logprobs = packed.likeliest
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_array_equal(logprobs, -np.array(wanted, np.float32))
    # Sample 1 has no reward, and the middle token is a tool's.
    np.testing.assert_array_equal(packed.mask, [0, 0, 0, 0, 0, 1, 0, 1])
    assert pack(batch, [], 4).likeliest[0].size == 4  # padding alone


def test_without_its_teacher_there_is_nothing_to_learn():
    group = a_group([0, 0])
    group.likeliest = None
    batch = TrainBatch.from_groups([group], signals_of(made(), [group]), 1, 1)
    with pytest.raises(ValueError, match="no teacher has told its likeliest tokens"):
        _ = pack(batch, [0], 1).likeliest
    tokens = tokens_of(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    with pytest.raises(ValueError, match="wants the tokens' divergence"):
        made().loss(tokens)


def test_the_loss_is_the_divergence_whatever_the_policy_that_sampled():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    divergence = torch.tensor([0.25, 0.5], dtype=torch.float64, requires_grad=True)
    tokens = tokens_of(logprobs, logprobs.detach() - 3, torch.ones(2), rollout=torch.zeros(2))
    found = made().loss(replace(tokens, divergence=divergence))
    assert_close(found.values, divergence)
    assert_close(found.metrics["divergence"], divergence.detach())
    of_logprobs, of_divergence = torch.autograd.grad(
        found.values.sum(), (logprobs, divergence), allow_unused=True
    )
    assert of_logprobs is None and of_divergence.eq(1).all()


def test_a_preset_with_an_anchor_takes_a_loss_that_knows_none():
    for name in ("opd", "sdpo"):
        own = override(RunConfig(), [f"algorithm={name}", "algorithm.loss=distill"]).algorithm
        assert (own.loss, own.anchor) == ("distill", "trainer")
        given = override(
            RunConfig(),
            [f"algorithm={name}", "algorithm.loss=reinforce", "algorithm.correction=tis"],
        ).algorithm
        assert given.anchor == "rollout"  # weights are of the policy that is updated


def test_several_updates_and_older_samples_are_allowed_for_by_nothing():
    algorithm = made("algorithm.mini_batches=2", "algorithm.prompts_per_step=4")
    assert algorithm.corrects(algorithm.settings)
    assert algorithm.divergence.top_k == 20 and algorithm.divergence.beta == 1
    assert not made("algorithm.loss=reinforce").corrects(made("algorithm.loss=reinforce").settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["rollout.temperature=0.7"], "rollout.temperature=0.7: a teacher gives logprobs"),
        (["algorithm.advantage=grpo"], "advantage=grpo asks none; set advantage=teacher"),
        (["algorithm.reward_weight=1"], "goes by no advantage; leave it at 0"),
        (["algorithm.anchor=rollout"], "anchor=rollout has no effect with loss=distill"),
        (["algorithm.distill_beta=1.5"], "distill_beta"),
        (["algorithm.teacher_top_k=0"], "teacher_top_k"),
        (["algorithm.loss=ppo_clip", "algorithm.teacher_top_k=3"], "one of loss=distill"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        made(*settings)
