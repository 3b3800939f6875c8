"""The adapter as it is computed with, served and exported, where it began at its base.

Such an adapter holds A, B and, frozen, A0 and B0; a checkpoint has them as [A; A0] and [B, -B0]. To
multiply these in a short dtype would lose what was trained: a step changes B by less than bfloat16
tells apart at B's size, and what B A and B0 A0 are each rounded by is larger than what they differ
by. So everywhere else it is written as the differences, which are exact as far as float32 is:

    B A - B0 A0  =  (B - B0) A + (-B0) (A0 - A)  =  [B - B0, -B0] [A; A0 - A]

That is plain LoRA of the same shapes, and the same function. Torch is imported by those alone who
compute with it: checkpoints are read without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lora_moe_rl.adapters.spec import AdapterSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sum:
    """`a + alpha * b` of tensors of one shape, as they are when it is asked for."""

    a: torch.Tensor
    b: torch.Tensor
    alpha: float

    def __getitem__(self, index: tuple) -> Sum:
        return Sum(self.a[index], self.b[index], self.alpha)

    @property
    def shape(self) -> torch.Size:
        return self.a.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.a.dtype

    @property
    def device(self) -> torch.device:
        return self.a.device

    def value(self, out: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        return torch.add(self.a, self.b, alpha=self.alpha, out=out)


def moved_A(A: torch.Tensor, A0: torch.Tensor) -> Sum:
    """The second half of A as served."""
    return Sum(A0, A, -1.0)


def moved_B(B: torch.Tensor, minus_B0: torch.Tensor) -> Sum:
    """The first half of B as served."""
    return Sum(B, minus_B0, 1.0)


def served(spec: AdapterSpec, name: str, whole: np.ndarray) -> np.ndarray:
    """The canonical tensor `name` of a checkpoint, float32, as it is served."""
    site = spec.by_name.get(name.rpartition(".")[0])
    if site is None or not site.frozen_rank:
        return whole
    found, rank = whole.copy(), site.trained_rank
    if name.endswith(".A"):
        found[..., rank:, :] -= whole[..., :rank, :]
    else:
        found[..., :rank] += whole[..., rank:]
    return found
