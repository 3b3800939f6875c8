"""Several targets at a place, each with a weight, against torch's own."""

from __future__ import annotations

import pytest
import torch
from head_ranks import PADDED, SIZE, TEMPERATURE, H, tensors, wide_of_rank, wide_ours, wide_tensors

from lora_moe_rl.trainer import logits
from lora_moe_rl.trainer.head import Vocabulary
from lora_moe_rl.trainer.wide_head import WideLogProbs
from lora_moe_rl.verify.processes import run_processes


def by_torch(fed_at=None):
    """In float64: logprobs, their weighted sums, and the gradient of hidden."""
    hidden, weight, _, rows = tensors()
    labels, weights = wide_tensors()
    hidden = hidden.detach().double().requires_grad_()
    states = hidden[rows if fed_at is None else fed_at]
    every = torch.log_softmax(states @ weight[:SIZE].double().t() / TEMPERATURE, -1)
    logprobs = every.gather(1, labels[rows])
    sums = (logprobs * weights[rows]).sum(-1)
    (0.1 * sums).sin().sum().backward()
    return sums, logprobs, hidden.grad


def check(got, expected) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other.detach(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("at_once", [1, 7 * PADDED, 2**25])
def test_sums_logprobs_and_gradient_are_torchs(monkeypatch, at_once):
    monkeypatch.setattr(logits, "ELEMENTS_AT_ONCE", at_once)
    _, weight, *_ = tensors()
    check(wide_ours(Vocabulary(weight, 0, SIZE, None)), by_torch())


def test_a_vocabulary_cut_over_two_ranks_gives_the_same(tmp_path):
    for got in run_processes(2, wide_of_rank, str(tmp_path / "meeting"), timeout_s=240):
        check(got, by_torch())


def test_places_may_be_predicted_by_one_hidden_state():
    _, weight, _, rows = tensors()
    fed_at = rows // 2
    assert len(fed_at.unique()) < len(rows)
    check(wide_ours(Vocabulary(weight, 0, SIZE, None), fed_at), by_torch(fed_at))


def test_what_is_kept_does_not_grow_with_targets_or_the_vocabulary():
    hidden, weight, _, rows = tensors()
    labels, weights = wide_tensors()
    kept = []
    vocabulary = Vocabulary(weight, 0, SIZE, None)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        WideLogProbs.apply(hidden, labels, rows, rows, vocabulary, weights, TEMPERATURE, True)
    assert sorted(kept) == [len(rows), len(rows), len(rows) * H]


def test_without_gradients_the_logprobs_are_the_same():
    hidden, weight, _, rows = tensors()
    labels, weights = wide_tensors()
    vocabulary = Vocabulary(weight, 0, SIZE, None)
    with torch.no_grad():
        asked = hidden, labels, rows, rows, vocabulary, weights, TEMPERATURE, False
        sums, logprobs = WideLogProbs.apply(*asked)
    check((sums[rows], logprobs[rows]), by_torch()[:2])
