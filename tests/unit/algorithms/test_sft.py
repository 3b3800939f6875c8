"""Supervised fine-tuning against torch's own cross-entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from packed_tokens import tokens_of
from torch.testing import assert_close

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.data.samples import Answer, Group, Prompt
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.run.offline import RowAnswers

NAN = float("nan")


def sft(*settings: str):
    return algorithms.make(override(RunConfig(), ["algorithm=sft", *settings]))


async def answered(*answers: tuple[int, ...]) -> Group:
    wanted = tuple(Answer(str(ids), list(ids)) for ids in answers)
    return await RowAnswers(RunConfig(), None, None).rollout(
        Prompt(0, "", [5, 6], answers=wanted), None
    )


def group_of(*answers: tuple[int, ...]) -> Group:
    import asyncio

    return asyncio.run(answered(*answers))


def test_the_loss_of_a_token_is_its_cross_entropy_and_what_is_outside_has_none():
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, 0, 6, 2])
    logprobs = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    mask = torch.tensor([False, True, True, False])
    nothing = torch.full((4,), NAN, dtype=torch.float64)
    found = sft().loss(tokens_of(logprobs, nothing.where(~mask, 0.0), nothing, mask))
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert_close(found.values[mask], expected[mask])
    assert_close(found.metrics["nll"][mask], expected.detach()[mask])
    (ours,) = torch.autograd.grad(found.values.where(mask, 0.0).sum() / 2, logits)
    ignored = labels.where(mask, -100)
    (theirs,) = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits.double(), ignored), logits
    )
    assert_close(ours, theirs)


def test_every_token_of_an_answer_is_learned_and_none_of_the_prompt():
    (signal,) = signals_of(sft(), [group_of((7, 8, 2))])
    assert [w.tolist() for w in signal.weights] == [[1.0, 1.0, 1.0]]
    sample = group_of((7, 8, 2)).samples[0]
    assert sample.prompt_ids.tolist() == [5, 6] and sample.response_ids.tolist() == [7, 8, 2]
    assert sample.mask.all() and sample.versions.tolist() == [-1, -1, -1]


def test_perplexity_is_of_the_mean_over_tokens_and_a_nan_stays_one():
    assert sft().summary({"loss/nll": 2.0}) == {"loss/perplexity": math.exp(2.0)}
    assert np.isnan(sft().summary({"loss/nll": NAN})["loss/perplexity"])
    assert np.isfinite(sft().summary({"loss/nll": 1e6})["loss/perplexity"])


def test_no_forward_comes_before_an_update_whatever_the_epochs():
    several = ["algorithm=sft", "algorithm.epochs=2", "algorithm.mini_batches=4"]
    config = override(RunConfig(), several)
    assert algorithms.passes(config) == set()
    rl = override(RunConfig(), ["algorithm.epochs=2", "algorithm.mini_batches=4"])
    assert algorithms.passes(rl) == {"old"}


def test_a_row_has_one_answer():
    with pytest.raises(ConfigError, match="algorithm.group_size=8 must be at most 1"):
        sft("algorithm.group_size=8")
