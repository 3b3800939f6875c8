"""Queries and keys of gated DeltaNet at length 1, in trainer and engine."""

from __future__ import annotations

import torch

EPS = 1e-6  # flash-linear-attention's (`l2norm`), and so transformers' and vLLM's


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """x `[..., d]` of length 1 along the last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
