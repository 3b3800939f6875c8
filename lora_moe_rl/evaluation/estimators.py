"""pass@k, maj@k and how sure a mean over prompts is.

pass@k    1 - C(n-c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained
          on Code", equation 1. Unbiased for n samples of which c are right
maj@k     Wang et al. 2022, "Self-Consistency": the answer that most of k samples give
interval  normal, over the prompts' means: Miller 2024, "Adding Error Bars to Evals"; samples of
          one prompt depend on each other, prompts are taken not to
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that at least one of `k` samples, drawn from these without putting back, is right.
    NaN with fewer than `k` samples."""
    assert 0 <= num_right <= num_samples and k >= 1
    if k > num_samples:
        return math.nan
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(answers: Sequence[Hashable | None], right: Sequence[bool]) -> float:
    """How right the answer is that most samples of a prompt give: the share of the samples with
    that answer that are right, the mean over answers that tie. A sample without an answer (None)
    has no vote; 0 when none has one."""
    votes: dict[Hashable, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(bool(is_right))
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    first = [sum(given) / most for given in votes.values() if len(given) == most]
    return sum(first) / len(first)


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean over prompts, and half the width of its normal 95 % interval: 1.96 times the
    standard error. Prompts without a value (NaN) are left out; NaN where too few are left."""
    given = np.asarray(values, np.float64)
    given = given[~np.isnan(given)]
    if not len(given):
        return math.nan, math.nan
    if len(given) == 1:
        return float(given[0]), math.nan
    return float(given.mean()), Z95 * float(given.std(ddof=1)) / math.sqrt(len(given))
