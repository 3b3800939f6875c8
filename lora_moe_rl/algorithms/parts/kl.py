"""How far two policies are apart, from the tokens that one of them sampled.

The k3 estimator of KL(p || q) for tokens sampled from p (John Schulman, "Approximating KL
Divergence", 2020, http://joschu.net/blog/kl-approx.html): r - 1 - log r with r = q/p. It is
unbiased and never negative. In code: expm1(log r) - log r, which keeps its digits near r = 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

MISMATCH = ("kl", "mean_abs_logprob_diff", "max_abs_logprob_diff", "off_by_2x")


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) per token, the shape of the inputs; differentiable in `logprobs`,
    the policy's own."""
    log_ratio = reference - logprobs
    return log_ratio.expm1() - log_ratio


def mismatch(rollout: np.ndarray, trainer: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """How the trainer's logprobs differ from those the engine sampled with, at the same version.

    All inputs are of one shape; only tokens where `mask` is True count. Returns `kl`, the mean k3
    of KL(rollout || trainer), `mean_abs_logprob_diff`, `max_abs_logprob_diff`, `off_by_2x`, the
    share of tokens whose probabilities differ by more than a factor of 2, and `tokens`. Without
    tokens all are 0; a NaN on either side stays a NaN.
    """
    mask = np.asarray(mask, dtype=bool)
    log_ratio = np.asarray(trainer, dtype=np.float64)[mask] - np.asarray(rollout)[mask]
    if not log_ratio.size:
        return dict.fromkeys(MISMATCH, 0.0) | {"tokens": 0.0}
    off = np.abs(log_ratio)
    return {
        "kl": float(np.mean(np.expm1(log_ratio) - log_ratio)),
        "mean_abs_logprob_diff": float(np.mean(off)),
        "max_abs_logprob_diff": float(np.max(off)),
        "off_by_2x": float(np.mean(~(off <= math.log(2)))),
        "tokens": float(log_ratio.size),
    }


def worst(rollout: np.ndarray, trainer: np.ndarray, mask: np.ndarray) -> tuple[int, float] | None:
    """(index, |difference|) of the token where `mismatch` is largest, None without tokens. A NaN is
    larger than all, and its difference infinite."""
    if not np.any(mask):
        return None
    off = np.abs(np.asarray(trainer, dtype=np.float64) - np.asarray(rollout))
    off = np.where(mask, np.where(np.isnan(off), np.inf, off), -1.0)
    index = int(np.argmax(off))
    return index, float(off[index])


def estimate(kind: str, logprobs: Tensor, reference: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) of each token, shaped as the inputs, differentiable.

    k1: the log ratio, unbiased, of much variance; its gradient is 0 in the mean, so that it is no
    loss. k2: its square / 2, whose gradient is that of the KL. k3: see above. k3+: the value of k3
    with the gradient of k2 (verl's straight-through form).
    """
    if kind == "k1":
        return logprobs - reference
    if kind == "k3":
        return k3(logprobs, reference)
    squared = 0.5 * (logprobs - reference).square()
    return squared if kind == "k2" else squared + (k3(logprobs, reference) - squared).detach()
