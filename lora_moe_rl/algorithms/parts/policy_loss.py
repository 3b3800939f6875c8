"""The clipped policy gradient. Shape letter: T tokens of one micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from lora_moe_rl.algorithms.base import Tokens


def clipped_policy_loss(
    tokens: Tokens, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped objective, each token by itself, with a bound of its own on either side.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), where ratio is
    exp(logprobs - old): arXiv:1707.06347; the separate upper bound is DAPO's clip-higher,
    arXiv:2503.14476. Each token counts with its weight.

    Returns the sum over the tokens in the loss (the trainer divides by their number in the whole
    step, which no rank knows alone) and sums of the same tokens: `ratio`, `clipped_low`,
    `clipped_high` (tokens whose gradient the clip removed).
    """
    mask = tokens.mask
    ratio = (tokens.logprobs - tokens.old).where(mask, 0.0).exp()
    advantages = tokens.advantages.where(mask, 0.0)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -(ratio * advantages).minimum(clipped * advantages) * tokens.weights
    was = ratio.detach()
    sums = {
        "ratio": (was * mask).sum(),
        "clipped_low": ((was < 1.0 - clip_low) & (advantages < 0)).float().sum(),
        "clipped_high": ((was > 1.0 + clip_high) & (advantages > 0)).float().sum(),
    }
    return loss.sum(), sums
