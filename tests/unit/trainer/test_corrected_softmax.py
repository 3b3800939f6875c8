"""A softmax router with a correction, against transformers' router of ERNIE 4.5 in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeTopKRouter,
)

from lora_moe_rl.trainer import megatron_on_cpu

T, H, E, K = 50, 12, 7, 3


@pytest.fixture(scope="module")
def routing():
    megatron_on_cpu.install()  # before anything imports Megatron
    from lora_moe_rl.trainer.corrected_softmax import topk_routing_with_score_function

    return topk_routing_with_score_function


def reference() -> tuple[Ernie4_5_MoeTopKRouter, torch.Tensor]:
    torch.manual_seed(0)
    router = Ernie4_5_MoeTopKRouter(Ernie4_5_MoeConfig(hidden_size=H, moe_num_experts=E, moe_k=K))
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.moe_statics.e_score_correction_bias, std=0.3)
    return router, torch.randn(T, H)


def correction(router: Ernie4_5_MoeTopKRouter) -> torch.Tensor:
    return router.moe_statics.e_score_correction_bias[0]


def sparse(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.zeros(T, E, dtype=weights.dtype).scatter(1, ids, weights)


def test_choice_weights_and_gradients_are_those_of_transformers(routing):
    router, hidden = reference()
    logits, ids, weights = router(hidden)
    options = {"expert_bias": correction(router), "score_function": "softmax"}
    logits = logits.detach().requires_grad_()
    probs, chosen = routing(logits, K, router_replay=None, **options)
    torch.testing.assert_close(probs, sparse(ids, weights), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(chosen, sparse(ids, weights) > 0)
    plain = logits.topk(K).indices
    assert (plain.sort(-1).values != ids.sort(-1).values).any(-1).sum() > 10

    by_hand = logits.detach().double().requires_grad_()
    scores = by_hand.softmax(-1).gather(1, ids)
    wanted = sparse(ids, scores / scores.sum(-1, keepdim=True))
    weighed_by = torch.randn(T, E)
    (probs * weighed_by).sum().backward()
    (wanted * weighed_by.double()).sum().backward()
    torch.testing.assert_close(logits.grad.double(), by_hand.grad, rtol=1e-5, atol=1e-6)


def test_replayed_experts_are_weighed_by_their_scores(routing):
    """And what replay is told of the router's own choice has the correction in it."""
    router, hidden = reference()
    logits, own, _ = router(hidden)
    target = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    told = []

    def replayed(scores, topk, num_groups, group_topk, best):
        told.append(best(scores, topk, num_groups=num_groups, group_topk=group_topk)[1])
        return scores.gather(1, target), target

    replay = SimpleNamespace(get_replay_topk=replayed)
    options = {"expert_bias": correction(router), "score_function": "softmax"}
    probs, _ = routing(logits.detach(), K, router_replay=replay, **options)
    assert (told[0].sort(-1).values == own.sort(-1).values).all()
    scores = logits.double().softmax(-1).gather(1, target)
    wanted = sparse(target, scores / scores.sum(-1, keepdim=True))
    torch.testing.assert_close(probs.double(), wanted, rtol=1e-5, atol=1e-7)


def test_other_routers_are_left_as_they_are(routing):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function as stock

    logits, bias = torch.randn(T, E), torch.randn(E)
    for options in (
        {"score_function": "sigmoid", "expert_bias": bias},
        {"score_function": "softmax", "use_pre_softmax": True},
    ):
        for ours, theirs in zip(
            routing(logits, K, **options), stock(logits, K, **options), strict=True
        ):
            assert torch.equal(ours, theirs)
