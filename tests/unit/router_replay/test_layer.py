"""Which experts one router's forwards are counted to have used."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_dispatcher import dispatcher

pytestmark = pytest.mark.seconds  # imports Megatron

EXPERTS, TOP_K, TOKENS = 8, 3, 6
TARGET = np.array([[(t + k) % EXPERTS for k in range(TOP_K)] for t in range(TOKENS)])
SCORES = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
OWN = SCORES.numpy().argsort(axis=1)[:, ::-1][:, :TOP_K]


def layer_of(recompute: str | None = None):
    from megatron.core.transformer.moe.router_replay import RouterReplay

    from lora_moe_rl.router_replay.layer import LayerReplay

    config = SimpleNamespace(recompute_granularity=recompute, num_moe_experts=EXPERTS)
    moe = SimpleNamespace(
        router=SimpleNamespace(router_replay=RouterReplay()),
        token_dispatcher=dispatcher(),
        config=config,
        training=True,
    )
    return LayerReplay(0, torch.nn.Identity(), moe)


def forward(layer) -> np.ndarray:
    """What the router uses."""

    def own(scores, topk, **_):
        return torch.topk(scores, topk, dim=1)

    return layer.topk(SCORES, TOP_K, default_compute_topk=own)[1].numpy()


def counts(routes: np.ndarray) -> list[int]:
    return np.bincount(routes.ravel(), minlength=EXPERTS).tolist()


def test_own_choices_that_were_not_replayed_are_counted():
    own, target = np.sort(OWN), OWN.copy()
    target[1] = target[1, ::-1]  # in another order: the same
    target[2, 0] = next(e for e in range(EXPERTS) if e not in OWN[2])
    target[4] = [e for e in range(EXPERTS) if e not in OWN[4]][:TOP_K]
    assert (own != np.sort(target)).any(axis=1).tolist() == [0, 0, 1, 0, 1, 0]
    layer = layer_of()
    layer.set_target(lambda: torch.from_numpy(target))
    forward(layer)
    assert (int(layer.differing), int(layer.replayed)) == (1 + TOP_K, TOKENS * TOP_K)
    layer.reset()
    counted = torch.tensor([True, True, True, False, False, False])
    layer.set_target(lambda: torch.from_numpy(target), counted)
    forward(layer)
    assert (int(layer.differing), int(layer.replayed)) == (1, 3 * TOP_K)


def test_what_is_used_counts_replayed_or_not_and_padding_does_not():
    known = torch.tensor([True, True, True, True, False, False])
    free = torch.tensor([False, True, False, False, False, False])
    layer = layer_of()
    layer.stands_for = torch.tensor([1, 3, 1, 1, 0, 0])  # the second is of a prompt of three
    layer.set_target(lambda: torch.from_numpy(TARGET), known & ~free, free)
    used = forward(layer)
    assert (used[1] == OWN[1]).all() and (used[2] == TARGET[2]).all()
    counted = np.array(counts(used[:4])) + 2 * np.array(counts(used[1:2]))
    assert layer.loads.tolist() == counted.tolist()
    layer.clear_target()
    layer.stands_for = None
    forward(layer)
    assert layer.loads.tolist() == (counted + counts(OWN)).tolist()
    layer.reset()
    assert layer.loads is None


def test_forwards_that_are_not_the_policys_in_training_do_not_count():
    layer = layer_of()
    layer.judged = False
    forward(layer)
    layer.judged, layer.moe.training = True, False
    forward(layer)
    assert layer.loads is None and layer.calls == 2


def test_a_forward_that_is_recomputed_in_backward_counts_once():
    layer = layer_of("full")
    layer.set_target(lambda: torch.from_numpy(TARGET))
    with torch.no_grad():
        forward(layer)
    forward(layer)
    assert (layer.calls, layer.recomputations) == (1, 1)
    assert layer.loads.tolist() == counts(TARGET)
