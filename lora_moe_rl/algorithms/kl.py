"""How far two policies are apart, from the tokens that one of them sampled.

The k3 estimator of KL(p || q) for tokens sampled from p (John Schulman, "Approximating KL
Divergence", 2020, http://joschu.net/blog/kl-approx.html): r - 1 - log r with r = q/p. It is
unbiased and never negative. In code: expm1(log r) - log r, which keeps its digits near r = 1.
"""

from __future__ import annotations

import numpy as np
import torch


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) per token, the shape of the inputs; differentiable in `logprobs`,
    the policy's own."""
    log_ratio = reference - logprobs
    return torch.expm1(log_ratio) - log_ratio


def mismatch(rollout: np.ndarray, trainer: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """How the trainer's logprobs differ from those the engine sampled with, at the same version.

    All inputs are of one shape; only tokens where `mask` is True count. Returns `kl`, the mean k3
    of KL(rollout || trainer), `max_abs_logprob_diff`, and `tokens`. Without tokens both are 0; a
    NaN on either side stays a NaN.
    """
    mask = np.asarray(mask, dtype=bool)
    log_ratio = np.asarray(trainer, dtype=np.float64)[mask] - np.asarray(rollout)[mask]
    if not log_ratio.size:
        return {"kl": 0.0, "max_abs_logprob_diff": 0.0, "tokens": 0.0}
    return {
        "kl": float(np.mean(np.expm1(log_ratio) - log_ratio)),
        "max_abs_logprob_diff": float(np.max(np.abs(log_ratio))),
        "tokens": float(log_ratio.size),
    }
