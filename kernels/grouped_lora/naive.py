"""The readable reference: one expert and one site after the other. Any dtype, float64 too;
gradients are autograd's."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def grouped_lora(
    x: torch.Tensor,
    A: torch.Tensor,
    Bs: Sequence[torch.Tensor],
    counts: Sequence[int],
    scales: Sequence[float],
    ranks: Sequence[int] | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `op.grouped_lora`, everything in x's dtype; `into` is not changed."""
    rows_of_experts = []
    start = 0
    for e, count in enumerate(counts):
        x_e = x[start : start + count]
        start += count
        A_e = A[e] if A.dim() == 3 else A
        row, outs = 0, []
        for B, scale in zip(Bs, scales, strict=True):
            B_e = B[e] if B.dim() == 3 else B
            rank = B_e.shape[1] if ranks is None else min(B_e.shape[1], ranks[e])
            outs.append(scale * (x_e @ A_e[row : row + rank].T) @ B_e[:, :rank].T)
            row += B_e.shape[1]
        rows_of_experts.append(torch.cat(outs, dim=1))
    y = torch.cat(rows_of_experts)
    return y if into is None else into + y
