"""Packed tokens as a loss sees them, made by hand."""

from __future__ import annotations

import numpy as np
import torch

from lora_moe_rl.algorithms.base import Tokens


def tokens_of(
    logprobs, old, advantages, mask=None, rollout=None, reference=None, samples=None
) -> Tokens:
    """Tensors [T]; by default all tokens are in the loss, of one sample, sampled by the old policy.
    Outside the mask everything is 0, as the trainer makes it."""
    n = len(logprobs)
    mask = torch.ones(n, dtype=torch.bool) if mask is None else mask
    samples = torch.zeros(n, dtype=torch.long) if samples is None else samples

    def inside(values):
        return values.where(mask, 0.0)

    return Tokens(
        mask=mask,
        logprobs=inside(logprobs),
        old=inside(old),
        rollout=inside(old if rollout is None else rollout),
        reference=None if reference is None else inside(reference),
        advantages=inside(advantages),
        versions=torch.zeros(n, dtype=torch.int32),
        samples=samples,
        num_samples=int(samples.max()) + 2,
    )


def mean_over(values: torch.Tensor, tokens: Tokens, scales) -> torch.Tensor:
    """The step's loss, as the trainer puts it together for one micro-batch."""
    factor = torch.from_numpy(np.append(scales.of_sample, 0.0)).to(values.dtype)
    summed = (values.where(tokens.mask, 0.0) * factor[tokens.samples]).sum()
    return summed / scales.divisor
