"""Settings of parts that others have too, by hand; test_oracles.py compares them."""

from __future__ import annotations

import pytest
import torch
from packed_tokens import tokens_of

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.overrides import override
from lora_moe_rl.errors import ConfigError


def made(*settings: str):
    return algorithms.make(override(RunConfig(), list(settings)))


def test_tokens_that_the_dual_clip_holds_are_counted():
    """Ratios of 4 and 2 under a negative advantage and of 4 under a positive one: the first has no
    gradient, and the last none by the ordinary clip."""
    logprobs = torch.tensor([4.0, 2.0, 4.0]).log().requires_grad_()
    tokens = tokens_of(logprobs, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]))
    found = made("algorithm.dual_clip=3").loss(tokens)
    found.values.sum().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([0, 2, 0])
    assert found.metrics["clipped_dual"].tolist() == [1, 0, 0]
    assert found.metrics["clipped_high"].tolist() == [0, 0, 1]
    assert "clipped_dual" not in made().loss(tokens).metrics


@pytest.mark.parametrize(
    ("correction", "bounds", "expected"),
    [
        ("tis", (0.5, 2), [0.5, 0.8, 2.0, 0.6]),
        ("icepop", ("null", 5), [0.4, 0.8, 0.0, 0.6]),
        ("decoupled_seq_is", (0.9, 1.8), [1.8, 1.8, 1.8, 0.9]),
        ("decoupled_seq_is", ("null", 4), [1.92, 1.92, 1.92, 0.6]),
        ("mis", (0.9, 3), [1.92, 1.92, 1.92, 0.0]),
        ("mis", ("null", 1.8), [0.0, 0.0, 0.0, 0.6]),
    ],
)
def test_weights_may_have_a_lower_bound_too(correction, bounds, expected):
    """Ratios of 0.4, 0.8 and 6 in a sample, of product 1.92, and 0.6 in another."""
    ratios = torch.tensor([0.4, 0.8, 6.0, 0.6], dtype=torch.float64)
    zeros, samples = torch.zeros(4, dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    tokens = tokens_of(zeros, zeros, torch.ones(4), rollout=-ratios.log(), samples=samples)
    low, high = (
        f"algorithm.correction_{e}={b}" for e, b in zip(("min", "max"), bounds, strict=True)
    )
    algorithm = made(f"algorithm.correction={correction}", low, high)
    weights, metrics = algorithm._correction.weights(tokens.old - tokens.rollout, tokens)
    assert weights.tolist() == pytest.approx(expected)
    changed = weights != metrics["weight_largest"]
    assert metrics["weight_bounded"].tolist() == changed.tolist()


def test_the_gradient_of_a_weighted_kl_is_that_of_the_kl():
    """Of a policy over five tokens, from tokens of another one: each counts with the chance that
    it is sampled. Without the weight it is not, on-policy either."""
    draw = torch.Generator().manual_seed(0)
    logits, reference, old = torch.randn(3, 5, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    reference, old = reference.log_softmax(0), old.log_softmax(0)
    policy = logits.log_softmax(0)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    for weighted in ("true", "false"):
        for estimator in ("k1", "k3"):
            if (weighted, estimator) == ("false", "k1"):
                continue
            algorithm = made(
                "algorithm.kl_coef=1",
                f"algorithm.kl_weighted={weighted}",
                f"algorithm.kl_estimator={estimator}",
            )
            policy = logits.log_softmax(0)
            tokens = tokens_of(policy, old, torch.zeros(5), reference=reference)
            total = (algorithm.loss(tokens).values * old.exp()).sum()
            (found,) = torch.autograd.grad(total, logits)
            assert torch.allclose(found, wanted) == (weighted == "true")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["kl_weighted=true"], "kl_weighted=True has no effect with algorithm.kl_coef=0"),
        (
            ["kl_weighted=true", "kl_coef=1", "kl_in=reward"],
            "kl_in=reward takes it from the reward",
        ),
        (["kl_weighted=true", "kl_coef=1", "kl_estimator=k2"], "would have another; take k1 or k3"),
        (["kl_weighted=true", "kl_coef=1", "kl_estimator=k3+"], "kl_estimator=k3\\+ has the gradi"),
        (["loss=vespo", "rejection=tokens"], "loss=vespo has one ratio a sample"),
        (["correction=tis", "correction_min=1.5"], "correction_min=1.5 is above 1"),
        (["advantage=grpo_passk", "group_size=1"], "leaves none to compare with"),
        (
            ["rejection=sequence_mean", "rejection_divergence=k3"],
            "rejection_divergence=k3 wants a rejection_max of its own: the default, 1.001, is one",
        ),
        (["rejection=veto", "rejection_divergence=k2"], "the default, 10000, is one of the ratio"),
        (
            ["rejection=sequence_mean,veto", "rejection_divergence=k1,k3"],
            "the default, 10000, is one of the ratio.*of algorithm.rejection=veto",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        made(*(f"algorithm.{one}" for one in settings))
