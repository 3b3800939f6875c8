"""Advantages that wait for forwards, on two ranks that each have one of two samples."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import pack

pytestmark = pytest.mark.seconds  # imports Megatron


def make_batch() -> TrainBatch:
    """Two samples of one prompt, of 3 response tokens, one of which a tool wrote, and of 2."""
    return TrainBatch(
        token_ids=[np.array([10, 11, 12, 13, 14]), np.array([20, 21, 22])],
        prompt_lengths=np.array([2, 1]),
        logprobs=[np.zeros(3, np.float32), np.zeros(2, np.float32)],
        versions=[np.array([3, -1, 3]), np.array([4, 4])],
        advantages=[np.full(3, 9, np.float32), np.full(2, 9, np.float32)],
        weights=[np.array([1, 0, 1], np.float32), np.ones(2, np.float32)],
        masks=[np.array([True, False, True]), np.ones(2, bool)],
        mini_batch=np.zeros(2, int),
        groups=np.zeros(2, int),
        copies=np.ones(2, int),
        rewards=np.array([1.0, 0.0]),
    )


def on_a_rank(sample: int):
    """A rank with one of the samples, padded to a multiple of 4; KL 2 and 1, or -1 and 0.5, and 50
    at the tool's token and outside the response, where it is to count for nothing."""
    from lora_moe_rl.trainer.engine import Work

    work = Work(pack(make_batch(), [sample], multiple=4), None)
    kl = {0: [50.0, 2.0, 50.0, 1.0], 1: [-1.0, 0.5, 50.0, 50.0]}[sample]
    work.known = {"old": torch.tensor(kl), "reference": torch.zeros(4)}
    return work


def revised_on(sample: int, batch: TrainBatch, **settings):
    from lora_moe_rl.trainer.advantages import revise

    other = on_a_rank(1 - sample)
    theirs = {
        name: np.concatenate(
            [
                value.numpy()[other.data.response] if i != sample else np.zeros(n)
                for i, n in enumerate((3, 2))
            ]
        )
        for name, value in other.known.items()
    }
    sums = iter([theirs["old"], theirs["reference"]])
    meter = SimpleNamespace(
        reports=True, all_reduce=lambda values: (next(sums) + np.array(values)).tolist()
    )
    algorithm = algorithms.make(RunConfig(algorithm={"name": "rloo", **settings}))
    work = on_a_rank(sample)
    revise(SimpleNamespace(algorithm=algorithm), batch, [work], meter)
    return work.data


def test_the_samples_of_all_ranks_are_compared_and_each_token_gets_its_advantage():
    # Rewards 1 - 0.1 * 3 and 0 - 0.1 * -0.5: 0.7 and 0.05.
    first = revised_on(0, make_batch(), kl_coef=0.1)
    second = revised_on(1, make_batch(), kl_coef=0.1)
    np.testing.assert_allclose(first.advantages, [0, 0.65, 0.65, 0.65], rtol=1e-6)
    np.testing.assert_allclose(second.advantages, [-0.65, -0.65, 0, 0], rtol=1e-6)
    assert first.advantages.dtype == np.float32


def test_advantages_stay_as_they_are_when_none_are_to_be_revised():
    found = revised_on(0, make_batch(), kl_coef=0.1, kl_in="loss")
    assert found.advantages.tolist() == [0, 9, 9, 9]


def test_a_batch_without_rewards_is_refused():
    batch = make_batch()
    batch.rewards = None
    with pytest.raises(ValueError, match="its signals had no rewards"):
        revised_on(0, batch, kl_coef=0.1)


def test_the_kl_weighs_as_the_step_says_and_turns_have_what_they_earned():
    """A batch of a step with a weight of its own, and of a reward of 1 that the first token earned
    by 3/4."""
    weighed = replace(make_batch(), kl_coef=0.1)
    first = revised_on(0, weighed, kl_coef=0.5, kl_target=0.01)
    np.testing.assert_allclose(first.advantages, [0, 0.65, 0.65, 0.65], rtol=1e-6)
    none = {"name": "reinforce_pp", "kl_coef": 1e-9, "kl_in": "reward"}
    earlier = [np.array([0.75, 0.0, 0.0]), np.zeros(2)]
    found = revised_on(0, replace(make_batch(), earlier=earlier), **none).advantages
    to_come = np.array([1, 0.25, 0, 0])  # of the tokens that the policy wrote, of both samples
    scale = np.sqrt(to_come.var(ddof=1))
    np.testing.assert_allclose(found[[1, 3]], (to_come[:2] - to_come.mean()) / scale, rtol=1e-5)
