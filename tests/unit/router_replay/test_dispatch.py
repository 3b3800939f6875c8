"""Sizes that a dispatcher of Megatron-core is told, against those that it asks the ranks for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain_dispatcher import EXPERTS, TOP_K, dispatcher

from lora_moe_rl.errors import ReplayError

pytestmark = pytest.mark.seconds  # imports Megatron

TOLD = ("input_splits", "output_splits", "output_splits_tp", "num_global_tokens_per_local_expert")


def maps(ranks: int, tokens: int) -> list[torch.Tensor]:
    """Of each rank bool `[tokens, experts]`; the first experts are chosen more often."""
    rng, found = np.random.default_rng(ranks * 100 + tokens), []
    likely = np.arange(EXPERTS, 0, -1) / np.arange(EXPERTS, 0, -1).sum()
    for _ in range(ranks):
        chosen = torch.zeros(tokens, EXPERTS, dtype=torch.bool)
        for row in chosen:
            row[rng.choice(EXPERTS, TOP_K, replace=False, p=likely)] = True
        found.append(chosen)
    return found


def told(moe_dispatcher, everyones: list[torch.Tensor], rank: int):
    from lora_moe_rl.router_replay.dispatch import Dispatch, LayerSizes

    every = np.stack([one.sum(dim=0).numpy() for one in everyones])
    dispatch = Dispatch(0, SimpleNamespace(token_dispatcher=moe_dispatcher))
    dispatch.sizes = LayerSizes(every, torch.from_numpy(every[rank]))
    return dispatch, moe_dispatcher.preprocess(everyones[rank])


@pytest.mark.parametrize("tokens", [1, 29])
@pytest.mark.parametrize(
    ("ep", "tp"), [(1, 1), (2, 1), (1, 2), (3, 2), (2, 3), (EXPERTS, 1), (EXPERTS, 2)], ids=str
)
def test_what_is_told_is_what_upstream_asks_for(ep, tp, tokens, monkeypatch):
    from megatron.core.transformer.moe import token_dispatcher

    everyones = maps(ep * tp, tokens)
    gathered = torch.cat([one.sum(dim=0) for one in everyones])
    monkeypatch.setattr(
        token_dispatcher, "gather_from_sequence_parallel_region", lambda mine, group: gathered
    )
    for rank in range(ep * tp):
        asking, knowing = dispatcher(ep, tp, rank), dispatcher(ep, tp, rank)
        expected = asking.preprocess(everyones[rank])
        dispatch, found = told(knowing, everyones, rank)
        assert found.tolist() == expected.tolist() and found.dtype == expected.dtype
        assert knowing.num_out_tokens == asking.num_out_tokens == tokens * TOP_K
        for name in TOLD:
            if (wanted := getattr(asking, name, None)) is None:
                assert getattr(knowing, name, None) is None, name
            else:
                assert getattr(knowing, name).tolist() == wanted.tolist(), name
        assert (asking.cuda_sync_point, knowing.cuda_sync_point) != ("no_sync", "no_sync")
        assert knowing.cuda_sync_point == "no_sync" and int(dispatch.wrong) == 0


def test_sizes_are_of_one_forward_and_others_are_asked_for():
    (chosen,) = maps(1, 7)
    knowing = dispatcher()
    told(knowing, [chosen], 0)
    assert knowing.cuda_sync_point == "no_sync"
    again = knowing.preprocess(chosen)
    assert knowing.cuda_sync_point == "before_permutation_2"  # upstream's
    assert again.tolist() == chosen.sum(dim=0).tolist()


def test_sizes_of_other_routes_are_counted():
    one, other = maps(2, 7)
    dispatch, _ = told(dispatcher(), [one], 0)
    assert int(dispatch.wrong) == 0
    dispatch.sizes = SimpleNamespace(every=one.sum(dim=0).numpy()[None], mine=one.sum(dim=0))
    dispatch.dispatcher.preprocess(other)
    assert int(dispatch.wrong) == int((one.sum(dim=0) != other.sum(dim=0)).sum()) > 0


def test_another_dispatcher_and_fused_permutation_are_refused():
    from lora_moe_rl.router_replay.dispatch import Dispatch

    with pytest.raises(ReplayError, match="layer 4: .* knows no dispatcher SimpleNamespace"):
        Dispatch(4, SimpleNamespace(token_dispatcher=SimpleNamespace()))
    with pytest.raises(ReplayError, match="layer 4: .*moe_permute_fusion=False alone"):
        Dispatch(4, SimpleNamespace(token_dispatcher=dispatcher(fused=True)))
