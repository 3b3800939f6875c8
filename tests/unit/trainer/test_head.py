"""Logprobs and entropy of a frozen head, some rows at a time, against torch's own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from head_ranks import PADDED, SIZE, TEMPERATURE, H, bonus, clipped, of_rank, ours, tensors

from lora_moe_rl.trainer import head, logits
from lora_moe_rl.trainer.head import Head, LogProbs, Trained, Vocabulary
from lora_moe_rl.verify.processes import run_processes


def by_torch(hidden, weight, labels, rows, trained=Trained.LOGPROBS):
    """In float64: logprobs, entropy, and the gradient of hidden."""
    hidden = hidden.detach().double().requires_grad_()
    logits = hidden[rows] @ weight[:SIZE].double().t() / TEMPERATURE
    of = torch.distributions.Categorical(logits=logits)
    logprobs, entropy = of.log_prob(labels[rows]), of.entropy()
    loss = clipped(logprobs)
    if trained == Trained.ENTROPY_TOO:
        loss = loss + bonus(entropy)
    loss.backward()
    return logprobs, entropy, hidden.grad


# Each value's own, in float32: which of them are off, a CPU's order of summing decides.
LAST_BITS = 4 * 2.0**-23


def check(got, rows, expected) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other.detach(), rtol=LAST_BITS, atol=2e-6)


@pytest.mark.parametrize("trained", [Trained.LOGPROBS, Trained.ENTROPY_TOO])
@pytest.mark.parametrize("at_once", [1, 7 * PADDED, 2**25])
def test_logprobs_entropy_and_gradient_are_torchs(monkeypatch, at_once, trained):
    monkeypatch.setattr(logits, "ELEMENTS_AT_ONCE", at_once)
    hidden, weight, labels, rows = tensors()
    got = ours(hidden, labels, rows, Vocabulary(weight, 0, SIZE, None), trained)
    check(got, rows, by_torch(hidden, weight, labels, rows, trained))


def test_the_gradient_of_the_entropy_alone_is_torchs():
    """To a millionth of its largest: no gradient of a logprob is there to hide it."""
    hidden, weight, labels, rows = tensors()
    vocabulary = Vocabulary(weight, 0, SIZE, None)
    _, entropy, _ = LogProbs.apply(
        hidden, labels, rows, rows, vocabulary, TEMPERATURE, Trained.ENTROPY_TOO
    )
    bonus(entropy[rows]).backward()
    plain = hidden.detach().double().requires_grad_()
    logits = plain[rows] @ weight[:SIZE].double().t() / TEMPERATURE
    bonus(torch.distributions.Categorical(logits=logits).entropy()).backward()
    largest = plain.grad.abs().max()
    assert largest > 0.1
    torch.testing.assert_close(hidden.grad.double(), plain.grad, rtol=0, atol=1e-6 * largest)


def test_the_entropy_of_a_policy_that_is_sure_has_no_gradient():
    """Of logits far apart: none but one token is possible."""
    hidden, weight, labels, rows = tensors()
    sure = (hidden.detach() * 1e7).requires_grad_()
    vocabulary = Vocabulary(weight, 0, SIZE, None)
    _, entropy, _ = LogProbs.apply(
        sure, labels, rows, rows, vocabulary, TEMPERATURE, Trained.ENTROPY_TOO
    )
    entropy.sum().backward()
    assert not entropy.any() and not sure.grad.any()


def test_tokens_may_be_predicted_by_one_hidden_state():
    """Of a prompt's last token, which is computed once: its gradient is the sum."""
    hidden, weight, labels, rows = tensors()
    fed_at = rows // 2
    vocabulary = Vocabulary(weight, 0, SIZE, None)
    logprobs, entropy, _ = LogProbs.apply(
        hidden, labels, rows, fed_at, vocabulary, TEMPERATURE, Trained.ENTROPY_TOO
    )
    (clipped(logprobs[rows]) + bonus(entropy[rows])).backward()
    plain = hidden.detach().double().requires_grad_()
    logits = plain[fed_at] @ weight[:SIZE].double().t() / TEMPERATURE
    of = torch.distributions.Categorical(logits=logits)
    expected = of.log_prob(labels[rows])
    (clipped(expected) + bonus(of.entropy())).backward()
    assert len(fed_at.unique()) < len(rows)
    torch.testing.assert_close(logprobs[rows].double(), expected, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(hidden.grad.double(), plain.grad, rtol=1e-6, atol=2e-6)


def test_no_row_at_all_is_a_gradient_of_zero():
    hidden, weight, labels, _ = tensors()
    none = torch.zeros(0, dtype=torch.int64)
    vocabulary = Vocabulary(weight, 0, SIZE, None)
    logprobs, entropy, _ = LogProbs.apply(
        hidden, labels, none, none, vocabulary, 1.0, Trained.ENTROPY_TOO
    )
    (logprobs + entropy).sum().backward()
    assert not logprobs.any() and not hidden.grad.any()


def test_without_gradients_the_logprobs_are_the_same_and_nothing_is_kept():
    hidden, weight, labels, rows = tensors()
    vocabulary = Vocabulary(weight, 0, SIZE, None)
    with_them, _, _ = LogProbs.apply(
        hidden, labels, rows, rows, vocabulary, TEMPERATURE, Trained.LOGPROBS
    )
    with torch.no_grad():
        without, entropy, _ = LogProbs.apply(
            hidden, labels, rows, rows, vocabulary, TEMPERATURE, Trained.NOTHING
        )
    assert torch.equal(without, with_them.detach()) and without.grad_fn is None
    assert not entropy.any()


def test_without_gradients_the_entropy_is_told_where_it_is_wanted():
    hidden, weight, labels, rows = tensors()
    with torch.no_grad():
        arguments = (Vocabulary(weight, 0, SIZE, None), TEMPERATURE, Trained.NOTHING, True)
        logprobs, entropy, _ = LogProbs.apply(hidden, labels, rows, rows, *arguments)
    check((logprobs[rows], entropy[rows]), rows, by_torch(hidden, weight, labels, rows)[:2])


@pytest.mark.parametrize("trained", [Trained.LOGPROBS, Trained.ENTROPY_TOO])
def test_what_is_kept_does_not_grow_with_the_vocabulary(trained):
    """A row of hidden states for the logprobs, and one more where the entropy is trained."""
    hidden, weight, labels, rows = tensors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.numel()) or x, lambda x: x
    ):
        vocabulary = Vocabulary(weight, 0, SIZE, None)
        LogProbs.apply(hidden, labels, rows, rows, vocabulary, TEMPERATURE, trained)
    assert sorted(kept) == [len(rows), len(rows), *[len(rows) * H] * trained]


@pytest.mark.parametrize("trained", [Trained.LOGPROBS, Trained.ENTROPY_TOO])
def test_a_vocabulary_cut_over_two_ranks_gives_the_same(trained, tmp_path):
    """Each rank's gradient is its part of the sum."""
    found = run_processes(2, of_rank, str(tmp_path / "meeting"), trained, timeout_s=240)
    hidden, weight, labels, rows = tensors()
    for got in found:
        check(got, rows, by_torch(hidden, weight, labels, rows, trained))


def test_a_head_scores_the_response_and_tells_its_work_of_the_entropy(monkeypatch):
    """As megatron-core calls it: hidden `[T, 1, H]`, the weights of tied embeddings apart."""
    for cut in ("tensor_model", "context"):
        monkeypatch.setattr(head.ps, f"get_{cut}_parallel_world_size", lambda: 1)
        monkeypatch.setattr(head.ps, f"get_{cut}_parallel_rank", lambda: 0)
    monkeypatch.setattr(head.ps, "get_tensor_model_parallel_group", lambda: None)
    alone = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(head.ps, "get_context_parallel_group", lambda: alone)
    hidden, weight, labels, rows = tensors()
    response = torch.zeros(len(hidden), dtype=torch.bool)
    response[rows] = True
    work = SimpleNamespace(
        data=SimpleNamespace(
            labels=labels.numpy(),
            response=response.numpy(),
            fed=np.arange(len(hidden)),
            fed_at=np.arange(len(hidden)),
        ),
        entropy=None,
    )
    layer = SimpleNamespace(weight=torch.full_like(weight, torch.nan))
    called = {"hidden_states": hidden[:, None], "output_layer": layer, "labels": None}
    give = Head(TEMPERATURE, SIZE)
    with torch.no_grad():
        give(**called, output_weight=weight, context=work)
    assert work.entropy is None
    with torch.no_grad():
        told = Head(TEMPERATURE, SIZE, tells_entropy=True)
        told(**called, output_weight=weight, context=work)
    assert work.entropy is not None and work.entropy[rows].all()
    logprobs = give(**called, output_weight=weight, context=work)
    expected, entropy, _ = by_torch(hidden, weight, labels, rows)
    check((logprobs[rows], work.entropy[rows]), rows, (expected, entropy))
    assert not work.entropy.requires_grad
    Head(TEMPERATURE, SIZE, trains_entropy=True)(**called, output_weight=weight, context=work)
    assert work.entropy.requires_grad
