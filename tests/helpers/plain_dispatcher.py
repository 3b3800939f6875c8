"""A token dispatcher of Megatron-core as it is on one rank, without groups of processes."""

from __future__ import annotations

from types import SimpleNamespace

import torch

TOP_K, EXPERTS = 3, 12
PRIORITY = {
    "before_permutation_1": 0,
    "before_ep_alltoall": 1,
    "before_permutation_2": 2,
    "before_finish": 3,
    "no_sync": 4,
}


def dispatcher(ep: int = 1, tp: int = 1, rank: int = 0, fused: bool = False):
    """That of a rank of ep * tp."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    made = object.__new__(MoEAlltoAllTokenDispatcher)
    local = EXPERTS // ep
    first = rank // tp * local  # tensor ranks are next to each other
    made.config = SimpleNamespace(
        moe_permute_fusion=fused,
        moe_router_topk=TOP_K,
        moe_expert_capacity_factor=None,
        moe_router_padding_for_quantization=False,
    )
    made.ep_size, made.tp_size, made.tp_rank = ep, tp, rank % tp
    made.tp_ep_group = SimpleNamespace(rank=lambda: rank)
    made.num_local_experts, made.num_experts = local, EXPERTS
    made.local_expert_indices = list(range(first, first + local))
    made.drop_and_pad, made.cuda_dtoh_point = False, "before_permutation_1"
    made.cuda_sync_point, made.cuda_sync_point_priority = "no_sync", PRIORITY
    made.input_splits = made.output_splits = made.output_splits_tp = None
    made.probs = torch.zeros(1, EXPERTS)
    return made
