"""How far two policies are apart, from the tokens that one of them sampled.

The k3 estimator of KL(p || q) for tokens sampled from p (John Schulman, "Approximating KL
Divergence", 2020, http://joschu.net/blog/kl-approx.html): r - 1 - log r with r = q/p. It is
unbiased and never negative. In code: expm1(log r) - log r, which keeps its digits near r = 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from lora_moe_rl.algorithms.parts.part import LOG_BOUND

if TYPE_CHECKING:
    from torch import Tensor

MISMATCH = (
    "kl",
    "kl_k1",
    "kl_reverse",
    "chi2",
    "mean_abs_logprob_diff",
    "max_abs_logprob_diff",
    "off_by_2x",
)
OF_SAMPLES = ("rollout_ppl", "trainer_ppl", "chi2_sequence")


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) per token, the shape of the inputs; differentiable in `logprobs`,
    the policy's own. log r counts as LOG_BOUND where it is above that: exp of it would soon be inf,
    and the step lost. Where it is far below 0 the estimate is its size, and needs no bound."""
    log_ratio = (reference - logprobs).clamp(max=LOG_BOUND)
    return log_ratio.expm1() - log_ratio


def mismatch(rollout: np.ndarray, trainer: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """How the trainer's logprobs differ from those the engine sampled with, at the same version.

    All inputs are of one shape; only tokens where `mask` is True count. Returns `kl`, the mean k3
    of KL(rollout || trainer), `kl_k1`, the mean log ratio of the same KL, `kl_reverse`, the mean
    r log r - (r - 1) of KL(trainer || rollout) with r the ratio of trainer to rollout, `chi2`, the
    mean r^2 - 1 of chi^2(trainer || rollout), `mean_abs_logprob_diff`, `max_abs_logprob_diff`,
    `off_by_2x`, the share of tokens whose probabilities differ by more than a factor of 2, and
    `tokens`. For `kl_reverse` and `chi2` the log ratio is bounded at LOG_BOUND. Without tokens
    all are 0; a NaN on either side stays a NaN.
    """
    mask = np.asarray(mask, dtype=bool)
    log_ratio = np.asarray(trainer, dtype=np.float64)[mask] - np.asarray(rollout)[mask]
    if not log_ratio.size:
        return dict.fromkeys(MISMATCH, 0.0) | {"tokens": 0.0}
    off = np.abs(log_ratio)
    bounded = np.clip(log_ratio, -LOG_BOUND, LOG_BOUND)
    return {
        "kl": float(np.mean(np.expm1(log_ratio) - log_ratio)),
        "kl_k1": float(np.mean(-log_ratio)),
        "kl_reverse": float(np.mean(bounded * np.exp(bounded) - np.expm1(bounded))),
        "chi2": float(np.mean(np.expm1(2.0 * bounded))),
        "mean_abs_logprob_diff": float(np.mean(off)),
        "max_abs_logprob_diff": float(np.max(off)),
        "off_by_2x": float(np.mean(~(off <= math.log(2)))),
        "tokens": float(log_ratio.size),
    }


def mismatch_of_samples(
    rollout: np.ndarray, trainer: np.ndarray, mask: np.ndarray, samples: np.ndarray
) -> dict[str, float]:
    """Means over whole samples of what `mismatch` says of tokens. samples: int, the number of each
    token's sample, -1 for none.

    Returns `rollout_ppl` and `trainer_ppl`, exp of minus the mean logprob of a sample,
    `chi2_sequence`, the square of a sample's product of ratios, minus 1, and `samples`, how many
    have a token where `mask` is True. Without any all are 0.
    """
    mask = np.asarray(mask, dtype=bool)
    counts = np.bincount(samples[mask])
    there = counts > 0
    if not there.any():
        return dict.fromkeys(OF_SAMPLES, 0.0) | {"samples": 0.0}

    def sums(values: np.ndarray) -> np.ndarray:
        return np.bincount(samples[mask], weights=values[mask].astype(np.float64))[there]

    ours, theirs = sums(trainer), sums(rollout)
    apart = np.clip(ours - theirs, -LOG_BOUND, LOG_BOUND)
    return {
        "rollout_ppl": float(np.mean(np.exp(-theirs / counts[there]))),
        "trainer_ppl": float(np.mean(np.exp(-ours / counts[there]))),
        "chi2_sequence": float(np.mean(np.expm1(2.0 * apart))),
        "samples": float(there.sum()),
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
