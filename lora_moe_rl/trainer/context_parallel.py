"""Context parallelism: cp ranks each have an equal slice of a micro-batch's tokens.

    layer        q, k, v [F / cp, heads, d] ──all to all──> [F, heads / cp, d] ──attention──> back
    behind it    logprobs [T], 0 but where this rank's tokens predict ──sum──> the same on all

In attention a rank has all tokens and its share of the heads (DeepSpeed-Ulysses, arXiv:2309.14509),
so that it is what it is without cp, and all ranks have equally much to do however long the samples
are. From the logprobs on all cp ranks compute the same: the loss sees whole samples, and a gradient
reaches each token on the rank that was fed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.mappings import all_to_all


def all_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cp: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each `[F / cp, heads, d]` -> `[F, heads / cp, d]`. Where there are fewer key/value heads than
    ranks, each goes to all ranks whose queries read it."""
    kv_heads = max(key.shape[1], cp.size())
    key, value = (x.repeat_interleave(kv_heads // x.shape[1], 1) for x in (key, value))
    return _exchanged(query, cp), _exchanged(key, cp), _exchanged(value, cp)


def side_by_side(parts: Sequence[torch.Tensor], cp: dist.ProcessGroup) -> torch.Tensor:
    """Each `[F / cp, heads * d]`, of as many heads as may be, -> `[F, heads / cp * d]`, one beside
    the other: the same in one exchange, of what no two ranks read."""
    of_ranks = [part.unflatten(1, (cp.size(), -1)) for part in parts]
    return _exchanged(torch.cat(of_ranks, dim=2).flatten(1), cp)


def own_tokens(attended: torch.Tensor, cp: dist.ProcessGroup) -> torch.Tensor:
    """`[F, heads / cp * d]` of all tokens -> `[F / cp, heads * d]` of this rank's."""
    parts = all_to_all(cp, attended).unflatten(0, (cp.size(), -1))
    return parts.transpose(0, 1).flatten(1)


def _exchanged(x: torch.Tensor, cp: dist.ProcessGroup) -> torch.Tensor:
    of_ranks = x.unflatten(1, (cp.size(), -1)).transpose(0, 1)  # [cp, F / cp, heads / cp, …]
    return all_to_all(cp, of_ranks.flatten(0, 1))


def put_together(values: torch.Tensor, cp: dist.ProcessGroup) -> torch.Tensor:
    """`[T]`, each of which one rank has and the others have as 0, on every rank; the gradient of an
    element is that of any one rank, which all have."""
    if cp.size() == 1:
        return values
    return reduce_from_tensor_model_parallel_region(values.clone(), group=cp)  # sums in place


def gathered(values: torch.Tensor, cp: dist.ProcessGroup) -> torch.Tensor:
    """`[F / cp]` of each rank's tokens -> `[F]` on every rank; as `put_together` otherwise."""
    if cp.size() == 1:
        return values
    return gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=cp)
