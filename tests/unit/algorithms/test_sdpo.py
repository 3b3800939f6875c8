"""Self-distillation: loss and gradient are those of TRL's SDPOTrainer (tests/oracles/sdpo.py)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_tokens import mean_over, tokens_of

from lora_moe_rl import algorithms
from lora_moe_rl.algorithms.parts.aggregation import aggregate
from lora_moe_rl.algorithms.parts.step_signals import signals_of
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment

LOSSES = json.loads((Path(__file__).parents[1] / "rewards/sdpo_oracle.json").read_text())["losses"]
CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def made(**settings):
    return algorithms.make(RunConfig(algorithm={"name": "sdpo", **settings}))


def a_group(oracle) -> Group:
    """Samples as the oracle's student would have written them. Of one that is not taught the
    teacher's logprobs are its own."""
    samples, teacher = [], []
    given = (oracle[name] for name in ("mask", "student", "teacher", "taught"))
    for mask, student, other, taught in zip(*given, strict=True):
        own = np.array(student, np.float32)[mask]
        said = Segment.sampled(np.arange(len(own)), own, 0)
        samples.append(Sample((Segment.given("user", [5]), said), "stop", ""))
        teacher.append(np.array(other, np.float32)[mask] if taught else own)
    none = np.zeros(len(samples), np.float32)
    return Group(Prompt(0, "", [5]), samples, None, none, teacher=teacher)


@pytest.mark.parametrize("oracle", LOSSES, ids=["on policy", "moved, cut off", "moved"])
def test_loss_and_gradient_are_trls(oracle):
    """TRL's advantage is against the student that is trained, and ours against who sampled, which
    are one and the same here; the weight is against whom TRL calls old. A token's loss there is the
    log ratio times the logprob, and not divided by how many samples are taught."""
    algorithm = made(ratio_max=oracle["clip"])
    (signal,) = signals_of(algorithm, [a_group(oracle)])
    mask = np.array(oracle["mask"])
    advantages = np.zeros(mask.shape)
    advantages[mask] = np.concatenate(signal.advantages)
    flat = {name: torch.tensor(oracle[name]).reshape(-1) for name in ("student", "old")}
    logprobs = flat["student"].double().requires_grad_()
    samples = torch.arange(len(mask)).repeat_interleave(mask.shape[1])
    tokens = tokens_of(
        logprobs,
        logprobs.detach(),
        torch.tensor(advantages).reshape(-1),
        rollout=flat["old"].double(),
        mask=torch.tensor(mask).reshape(-1),
        samples=samples,
    )
    kept, of_one = mask.sum(axis=1), np.zeros(len(mask), int)
    how = algorithm.settings.aggregation
    scales = aggregate(how, kept, of_one, np.ones_like(kept), mask.shape[1])
    loss = mean_over(algorithm.loss(tokens).values, tokens, scales)
    loss.backward()
    np.testing.assert_allclose(loss.item(), oracle["loss"], **CLOSE)
    gradient = np.array(oracle["gradient"]).reshape(-1)
    np.testing.assert_allclose(logprobs.grad.numpy(), gradient, **CLOSE)
    assert (gradient != 0).sum() > 5


def read(words, rewards=(0, 0), **settings) -> bool:
    group = a_group(LOSSES[0])
    group.samples, group.rewards = group.samples[:2], np.array(rewards, np.float32)
    group.teacher_read = words
    return made(draw_again=2, **settings).has_signal(group)


def test_a_prompt_of_which_nothing_is_learned_may_be_drawn_again():
    """Rewards tell it apart only where they are learned from too."""
    assert read(["", "solution 0"], (1, 1)) and read(["feedback", "too long"])
    assert not read(["", "too long"]) and not read(["", ""], (0, 1))
    assert read(["", ""], (0, 1), reward_weight=0.5)
    assert not read(["", ""], (1, 1), reward_weight=0.5)
