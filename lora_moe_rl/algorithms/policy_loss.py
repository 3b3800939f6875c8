"""The clipped policy gradient. Shape letter: T tokens of one micro-batch."""

from __future__ import annotations

import torch


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped objective, each token by itself, with a bound of its own on either side.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), where ratio is
    exp(logprobs - old_logprobs): arXiv:1707.06347; the separate upper bound is DAPO's clip-higher,
    arXiv:2503.14476. All inputs are [T]; `mask` is bool. `old_logprobs` and `advantages` may hold
    anything, NaN too, where the mask is False.

    Returns the sum over the masked tokens (the caller divides by the number of tokens of the whole
    step, which no rank knows alone) and sums of the same tokens: `ratio`, `clipped_low`,
    `clipped_high` (tokens whose gradient the clip removed).
    """
    mask = mask.bool()
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        sums = {
            "ratio": (ratio * mask).sum(),
            "clipped_low": ((ratio < 1.0 - clip_low) & (advantages < 0)).float().sum(),
            "clipped_high": ((ratio > 1.0 + clip_high) & (advantages > 0)).float().sum(),
        }
    return loss.sum(), sums
