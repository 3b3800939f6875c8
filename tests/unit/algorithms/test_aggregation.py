"""What weighs the same, by hand; verl's four ways are compared in test_oracles.py."""

import numpy as np
import pytest

from lora_moe_rl.algorithms.parts.aggregation import aggregate

# Two prompts: one of samples with 1 and 3 tokens, one of samples with 4 and (rejected) 0.
KEPT, GROUPS = np.array([1, 3, 4, 0]), np.array([0, 0, 1, 1])
VALUES = [np.array([2.0]), np.array([1.0, 1.0, 4.0]), np.full(4, 3.0), np.zeros(0)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token-mean", (2 + 6 + 12) / 8),
        ("seq-mean-token-mean", (2 + 2 + 3) / 3),
        ("seq-mean-token-sum", (2 + 6 + 12) / 3),
        ("seq-mean-token-sum-norm", (2 + 6 + 12) / 3 / 10),
        ("prompt-mean", (8 / 4 + 12 / 4) / 2),
    ],
)
def test_the_loss_of_a_step_by_hand(how, expected):
    scales = aggregate(how, KEPT, GROUPS, max_response_tokens=10)
    summed = sum(s * v.sum() for s, v in zip(scales.of_sample, VALUES, strict=True))
    assert summed / scales.divisor == pytest.approx(expected, rel=1e-6)
    assert scales.of_sample.dtype == np.float32


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-mean", "prompt-mean"])
def test_a_step_without_tokens_has_no_divisor(how):
    scales = aggregate(how, np.zeros(4, int), GROUPS, 10)
    assert scales.divisor == 0 and np.isfinite(scales.of_sample).all()
