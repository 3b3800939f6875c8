"""Sums and means over the tokens of each sample of a micro-batch, which are all in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


def total(values: Tensor, tokens: Tokens) -> Tensor:
    """[T]: for each token the sum of `values` [T] over the tokens in the loss of its sample."""
    return _sums(values.where(tokens.mask, 0.0), tokens)[tokens.samples]


def mean(values: Tensor, tokens: Tokens) -> Tensor:
    """[T]: as `total`, the mean; 0 for a sample without tokens in the loss."""
    counts = _sums(tokens.mask.to(values.dtype), tokens)
    means = _sums(values.where(tokens.mask, 0.0), tokens) / counts.clamp(min=1)
    return means[tokens.samples]


def largest(values: Tensor, tokens: Tokens) -> Tensor:
    """[T]: as `total`, the largest of `values`, which are 0 or more."""
    found = values.new_zeros(tokens.num_samples)
    found.scatter_reduce_(0, tokens.samples, values.where(tokens.mask, 0.0), "amax")
    return found[tokens.samples]


def _sums(values: Tensor, tokens: Tokens) -> Tensor:
    return values.new_zeros(tokens.num_samples).index_add(0, tokens.samples, values)
