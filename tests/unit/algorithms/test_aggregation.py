"""What weighs the same, by hand; verl's ways are compared in test_oracles.py."""

import numpy as np
import pytest

from lora_moe_rl.algorithms.parts.aggregation import aggregate

# Two prompts: one of samples with 1 and 3 tokens, one of samples with 4 and (rejected) 0.
KEPT, GROUPS = np.array([1, 3, 4, 0]), np.array([0, 0, 1, 1])
ONCE = np.ones(4, int)
VALUES = [np.array([2.0]), np.array([1.0, 1.0, 4.0]), np.full(4, 3.0), np.zeros(0)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token-mean", (2 + 6 + 12) / 8),
        ("token-sum", 2 + 6 + 12),
        ("seq-mean-token-mean", (2 + 2 + 3) / 3),
        ("seq-mean-token-sum", (2 + 6 + 12) / 3),
        ("seq-mean-token-sum-norm", (2 + 6 + 12) / 3 / 10),
        ("prompt-mean", (8 / 4 + 12 / 4) / 2),
    ],
)
def test_the_loss_of_a_step_by_hand(how, expected):
    scales = aggregate(how, KEPT, GROUPS, ONCE, max_response_tokens=10)
    summed = sum(s * v.sum() for s, v in zip(scales.of_sample, VALUES, strict=True))
    assert summed / scales.divisor == pytest.approx(expected, rel=1e-6)
    assert scales.of_sample.dtype == np.float32


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("token-mean", (2 * 6 + 12) / (2 * 3 + 4)),
        ("token-sum", 2 * 6 + 12),
        ("seq-mean-token-mean", (2 * 2 + 3) / 3),
        ("seq-mean-token-sum", (2 * 6 + 12) / 3),
        ("seq-mean-token-sum-norm", (2 * 6 + 12) / 3 / 10),
        ("prompt-mean", (2 * 6 / (2 * 3) + 12 / 4) / 2),
    ],
)
def test_a_sample_that_stands_twice_counts_as_two_and_one_that_does_not_as_none(how, expected):
    """The first does not stand, the second does twice; so does the rejected one."""
    copies = np.array([0, 2, 1, 2])
    scales = aggregate(how, KEPT, GROUPS, copies, max_response_tokens=10)
    summed = sum(s * v.sum() for s, v in zip(scales.of_sample, VALUES, strict=True))
    assert summed / scales.divisor == pytest.approx(expected, rel=1e-6)
    real = np.repeat(np.arange(4), copies)
    really = aggregate(how, KEPT[real], GROUPS[real], np.ones(5, int), max_response_tokens=10)
    assert really.divisor == scales.divisor
    of_real = sum(s * VALUES[i].sum() for s, i in zip(really.of_sample, real, strict=True))
    assert of_real == pytest.approx(summed, rel=1e-6)


@pytest.mark.parametrize("copies", [ONCE, np.array([2, 2, 1, 1])])
@pytest.mark.parametrize(
    "how",
    [
        "token-mean",
        "token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-sum-norm",
        "prompt-mean",
    ],
)
def test_a_conversation_of_several_samples_weighs_as_one_sample_with_all_their_tokens(how, copies):
    """The first two are one conversation; what it weighs is what one of four tokens does."""
    scales = aggregate(how, KEPT, GROUPS, copies, 10, np.array([0, 0, 1, 2]))
    one = [np.concatenate(VALUES[:2]), *VALUES[2:]]
    whole = aggregate(how, np.array([4, 4, 0]), np.array([0, 1, 1]), copies[1:], 10)
    assert scales.divisor == whole.divisor
    found = sum(s * v.sum() for s, v in zip(scales.of_sample, VALUES, strict=True))
    expected = sum(s * v.sum() for s, v in zip(whole.of_sample, one, strict=True))
    assert found == pytest.approx(expected, rel=1e-6)


def test_forks_change_no_weight():
    """By hand: a conversation of two samples, [2] and [1 1 4], beside one of four tokens."""
    of = np.array([0, 0, 1, 2])
    for how, expected in (
        ("seq-mean-token-mean", (8 / 4 + 12 / 4) / 2),
        ("seq-mean-token-sum", (8 + 12) / 2),
        ("seq-mean-token-sum-norm", (8 + 12) / 2 / 10),
    ):
        scales = aggregate(how, KEPT, GROUPS, ONCE, 10, of)
        summed = sum(s * v.sum() for s, v in zip(scales.of_sample, VALUES, strict=True))
        assert summed / scales.divisor == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("how", ["token-mean", "token-sum", "seq-mean-token-mean", "prompt-mean"])
def test_a_step_without_tokens_has_no_divisor(how):
    scales = aggregate(how, np.zeros(4, int), GROUPS, ONCE, 10)
    assert scales.divisor == 0 and np.isfinite(scales.of_sample).all()
