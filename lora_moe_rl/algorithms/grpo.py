"""GRPO (arXiv:2402.03300) for one micro-batch. Shape letter: T tokens of the micro-batch.

The loss is a mean over tokens, not over samples first, as in DAPO (arXiv:2503.14476): each response
token of the step weighs the same. A micro-batch gives its sum; the trainer divides by the number of
response tokens of the whole step.
"""

from __future__ import annotations

import torch

from lora_moe_rl.algorithms.kl import k3
from lora_moe_rl.algorithms.policy_loss import clipped_policy_loss
from lora_moe_rl.config import AlgorithmConfig


def loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    config: AlgorithmConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The summed loss and the sums that the metrics are made of; all inputs are [T].

    `mask` is True on response tokens of samples that are kept. On-policy, `old_logprobs` is
    `logprobs.detach()`. `ref_logprobs` are the base's, adapters off; they are needed exactly when
    `config.kl_coef` is above 0.

    Sums, without gradient: `tokens`, `policy_loss`, `kl` (unweighted; 0 without a reference),
    `ratio`, `clipped_low`, `clipped_high`.
    """
    if (ref_logprobs is None) != (config.kl_coef == 0):
        given = "are missing" if ref_logprobs is None else "were computed for nothing"
        raise ValueError(f"algorithm.kl_coef={config.kl_coef}, but reference logprobs {given}")
    mask = mask.bool()
    policy_loss, sums = clipped_policy_loss(
        logprobs, old_logprobs, advantages, mask, config.clip_low, config.clip_high
    )
    total, kl = policy_loss, torch.zeros_like(policy_loss)
    if ref_logprobs is not None:
        kl = k3(logprobs, torch.where(mask, ref_logprobs, logprobs.detach()))
        kl = torch.where(mask, kl, 0.0).sum()
        total = policy_loss + config.kl_coef * kl
    sums |= {
        "tokens": mask.sum().to(policy_loss.dtype),
        "policy_loss": policy_loss.detach(),
        "kl": kl.detach(),
    }
    return total, sums
