"""The divergence from a teacher's likeliest tokens, a few rows at a time, against torch's own of
whole logits in float64."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from head_ranks import (
    PADDED,
    SIZE,
    TEMPERATURE,
    H,
    taught_of_rank,
    taught_ours,
    taught_tensors,
    tensors,
)

from lora_moe_rl.algorithms.parts.divergence import Divergence
from lora_moe_rl.trainer import logits
from lora_moe_rl.trainer.head import LogProbs, Trained, Vocabulary
from lora_moe_rl.trainer.taught_head import TeacherTokens
from lora_moe_rl.verify.processes import run_processes

BETAS = [0.0, 0.3, 1.0]
ORACLE = json.loads((Path(__file__).parent / "distillation_oracle.json").read_text())


def by_torch(beta: float, fed_at=None, ids=None, teacher=None):
    """The divergence and the gradient of hidden, from probabilities of all tokens."""
    hidden, weight, _, rows = tensors()
    if ids is None:
        ids, teacher = taught_tensors()
    hidden = hidden.detach().double().requires_grad_()
    states = hidden[rows if fed_at is None else fed_at]
    shares = torch.softmax(states @ weight[:SIZE].double().t() / TEMPERATURE, -1)
    p, q = ([one, 1 - one.sum(-1, keepdim=True)] for one in (teacher[rows].double().exp(), shares))
    q[0] = shares.gather(1, ids[rows])
    q[1] = 1 - q[0].sum(-1, keepdim=True)
    p, q = torch.cat(p, 1), torch.cat(q, 1)
    mixed = beta * p + (1 - beta) * q
    found = {
        0.0: p * (p / q).log(),
        1.0: q * (q / p).log(),
    }.get(beta, beta * p * (p / mixed).log() + (1 - beta) * q * (q / mixed).log())
    divergence = found.sum(-1)
    (0.3 * divergence).sin().sum().backward()
    return divergence, hidden.grad


def check(got, expected, atol=2e-6) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other.detach(), rtol=2e-6, atol=atol)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("at_once", [1, 7 * PADDED, 2**25])
def test_divergence_and_gradient_are_torchs(monkeypatch, at_once, beta):
    monkeypatch.setattr(logits, "ELEMENTS_AT_ONCE", at_once)
    _, weight, *_ = tensors()
    divergence, gradient = by_torch(beta)
    assert divergence.min() > 0.01 and gradient.abs().max() > 0.01
    check(taught_ours(Vocabulary(weight, 0, SIZE, None), beta), (divergence, gradient))


@pytest.mark.parametrize("beta", BETAS)
def test_a_vocabulary_cut_over_two_ranks_gives_the_same(beta, tmp_path):
    """Some of a place's likeliest tokens are on one rank, and some on the other."""
    for got in run_processes(2, taught_of_rank, str(tmp_path / "meeting"), beta, timeout_s=240):
        check(got, by_torch(beta))


def test_places_may_be_predicted_by_one_hidden_state():
    _, weight, _, rows = tensors()
    fed_at = rows // 2
    assert len(fed_at.unique()) < len(rows)
    check(taught_ours(Vocabulary(weight, 0, SIZE, None), 1.0, fed_at), by_torch(1.0, fed_at))


@pytest.mark.parametrize("beta", BETAS)
def test_a_policy_that_is_sure_has_finite_slopes(beta):
    """Of logits so far apart that the others' exponentials are 0; so is a probability of its
    teacher, for which vLLM writes -9999."""
    hidden, weight, labels, rows = tensors()
    sure = (hidden.detach() * 1e3).requires_grad_()
    ids, logprobs = taught_tensors()
    logprobs[:, 3] = -9999
    taught = TeacherTokens(Divergence(4, beta), ids, logprobs)
    arguments = (Vocabulary(weight, 0, SIZE, None), TEMPERATURE, Trained.LOGPROBS, True, taught)
    _, _, divergence = LogProbs.apply(sure, labels, rows, rows, *arguments)
    divergence.sum().backward()
    assert divergence.isfinite().all() and sure.grad.isfinite().all()
    assert divergence[rows].min() > 0


def test_a_policy_that_is_its_teacher_is_no_way_off():
    hidden, weight, labels, rows = tensors()
    every = torch.log_softmax(hidden.detach() @ weight[:SIZE].t() / TEMPERATURE, -1)
    likeliest = every.topk(4)
    for beta in BETAS:
        taught = TeacherTokens(Divergence(4, beta), likeliest.indices, likeliest.values)
        arguments = (Vocabulary(weight, 0, SIZE, None), TEMPERATURE, Trained.LOGPROBS, True, taught)
        _, _, divergence = LogProbs.apply(hidden, labels, rows, rows, *arguments)
        (gradient,) = torch.autograd.grad(divergence.sum(), hidden)
        assert divergence.abs().max() < 1e-6 and gradient.abs().max() < 1e-6


def test_a_hidden_state_more_is_kept_of_each_token_and_logprobs_keep_their_gradient():
    hidden, weight, labels, rows = tensors()
    kept = []
    taught = TeacherTokens(Divergence(4, 1.0), *taught_tensors())
    arguments = (Vocabulary(weight, 0, SIZE, None), TEMPERATURE, Trained.ENTROPY_TOO, True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        found = LogProbs.apply(hidden, labels, rows, rows, *arguments, taught)
    assert sorted(kept) == [len(rows), len(rows), *[len(rows) * H] * 3]
    alone = LogProbs.apply(hidden, labels, rows, rows, *arguments)
    for one, other in zip(found[:2], alone[:2], strict=True):
        of_one, of_other = (
            torch.autograd.grad(each.sum(), hidden, retain_graph=True)[0] for each in (one, other)
        )
        assert torch.equal(one, other) and torch.equal(of_one, of_other)


@pytest.mark.parametrize("case", ORACLE["cases"])
def test_divergence_and_gradient_are_trls(case):
    """Of logits that are the hidden states themselves (tests/oracles/distillation.py)."""
    hidden = torch.tensor(ORACLE["logits"], requires_grad=True)
    places, size = hidden.shape
    ids, logprobs = torch.tensor(case["ids"]), torch.tensor(case["logprobs"])
    taught = TeacherTokens(Divergence(ids.shape[1], case["beta"]), ids, logprobs)
    every = torch.arange(places)
    arguments = (Vocabulary(torch.eye(size), 0, size, None), 1.0, Trained.LOGPROBS, True, taught)
    _, _, divergence = LogProbs.apply(hidden, every, every, every, *arguments)
    divergence.sum().backward()
    expected = [
        torch.tensor(case[name], dtype=torch.float64) for name in ("divergence", "gradient")
    ]
    assert expected[0].min() > 0.01
    check((divergence, hidden.grad), expected)


@pytest.mark.parametrize("token", [SIZE, -1])
def test_a_token_that_the_policy_does_not_have_is_refused(token):
    ids = np.array([[3, token]], np.int32)
    likeliest = ids, np.full(ids.shape, -2, np.float32)
    with pytest.raises(ValueError, match=f"the id {token}, and the policy's vocabulary has {SIZE}"):
        TeacherTokens.of(Divergence(2, 0.0), likeliest, SIZE, torch.device("cpu"))
