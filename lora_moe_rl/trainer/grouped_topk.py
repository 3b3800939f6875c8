"""Group-limited routing as the models were trained with it.

megatron-core (`core/transformer/moe/moe_utils.py`, `group_limited_topk`) scores a group of
experts by the sum of its best `topk // group_topk`. DeepSeek-V3 and GLM-4.5 add up the best two
whatever the top-k, and DeepSeek-V2 takes the best one.
"""

from __future__ import annotations

from functools import partial

import torch
from megatron.core.transformer.moe import moe_utils

from lora_moe_rl.upstream.checks import require_parameters, require_version

WHO = "lora_moe_rl/trainer/grouped_topk.py"
_PARAMETERS = ("scores", "topk", "num_tokens", "num_experts", "num_groups", "group_topk")
_upstream = moe_utils.group_limited_topk


def group_limited_topk(
    scores: torch.Tensor,
    topk: int,
    num_tokens: int,
    num_experts: int,
    num_groups: int,
    group_topk: int,
    *,
    group_members: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(The best `topk` of scores `[T, E]` in the best `group_topk` of `num_groups` groups, their
    expert ids), both `[T, topk]`. A group's score is the sum of its best `group_members`."""
    groups = scores.view(num_tokens, num_groups, num_experts // num_groups)
    members = min(group_members, groups.shape[-1])
    best = groups.topk(members, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
    closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return torch.topk(
        groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1), k=topk, dim=-1
    )


def install(group_members: int) -> None:
    """Makes every router of this process score groups by their best `group_members`."""
    require_version("megatron-core", WHO)
    require_parameters(_upstream, _PARAMETERS, WHO)
    moe_utils.group_limited_topk = partial(group_limited_topk, group_members=group_members)
