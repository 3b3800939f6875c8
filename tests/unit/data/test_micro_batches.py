"""Samples to micro-batches."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_moe_rl.data.micro_batches import plan_micro_batches


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    max_tokens=st.integers(1, 80),
    dp=st.integers(1, 4),
)
def test_plan_uses_every_sample_once_and_all_ranks_equally_often(lengths, max_tokens, dp):
    lengths = np.array(lengths)
    plan = plan_micro_batches(range(len(lengths)), lengths, max_tokens, dp)
    assert len(plan) == dp
    assert len({len(micro_batches) for micro_batches in plan}) == 1
    chunks = [chunk for micro_batches in plan for chunk in micro_batches]
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(lengths)))
    for chunk in chunks:
        assert len(chunk) <= 1 or lengths[chunk].sum() <= max_tokens


def plan_by_definition(samples, lengths, max_tokens, dp_size, multiple) -> list[list[list[int]]]:
    """One more for each rank until they hold all; each sample in turn goes into the emptiest."""
    order = sorted(samples, key=lambda i: (-lengths[i], i))
    unit = dp_size * multiple
    count = max(1, math.ceil(sum(lengths[i] for i in order) / (max_tokens * unit))) * unit
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        for i in order:
            sizes = [sum(lengths[k] for k in chunk) for chunk in bins]
            bins[sizes.index(min(sizes))].append(i)
        if not any(len(b) > 1 and sum(lengths[k] for k in b) > max_tokens for b in bins):
            return [[sorted(b) for b in bins[rank::dp_size]] for rank in range(dp_size)]
        count += unit


@settings(deadline=None)
@given(
    lengths=st.integers(0, 30).flatmap(
        lambda shortest: st.lists(st.integers(shortest, 40), max_size=20)
    ),
    left_out=st.integers(0, 3),
    max_tokens=st.integers(1, 80),
    dp=st.integers(1, 3),
    multiple=st.integers(1, 2),
)
@example(lengths=[6] * 19, left_out=0, max_tokens=10, dp=1, multiple=1)  # one each, not 12 in all
@example(lengths=[100, 7, 7, 3, 0, 0], left_out=1, max_tokens=10, dp=2, multiple=1)
@example(lengths=[5, 5, 4, 4, 3, 3, 3], left_out=0, max_tokens=9, dp=1, multiple=1)
def test_the_plan_is_that_of_trying_one_more_micro_batch_after_the_other(
    lengths, left_out, max_tokens, dp, multiple
):
    lengths = np.array(lengths, dtype=np.int64)
    samples = range(min(left_out, len(lengths)), len(lengths))
    arguments = (samples, lengths, max_tokens, dp, multiple)
    assert plan_micro_batches(*arguments) == plan_by_definition(*arguments)


def test_a_sample_longer_than_the_limit_goes_alone():
    plan = plan_micro_batches(range(3), np.array([100, 3, 4]), 10, 1)
    assert [0] in plan[0]


@pytest.mark.parametrize("dp", [2, 3])
def test_fewer_samples_than_ranks_leave_empty_micro_batches(dp):
    plan = plan_micro_batches([0], np.array([5]), 10, dp)
    assert sum(bool(chunk) for rank in plan for chunk in rank) == 1
    assert all(len(rank) == 1 for rank in plan)
