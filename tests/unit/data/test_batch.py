"""Samples to packed micro-batches."""

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.data.batch import TrainBatch, pack, plan_micro_batches, unpack
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment


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


def make_batch() -> TrainBatch:
    """Two samples: prompt 10 11, response 12 13 14; prompt 20, response 21 22, left out."""
    floats = partial(np.array, dtype=np.float32)
    return TrainBatch(
        token_ids=[np.array([10, 11, 12, 13, 14]), np.array([20, 21, 22])],
        prompt_lengths=np.array([2, 1]),
        logprobs=[floats([-1, -2, -3]), floats([-4, -5])],
        versions=[np.array([3, 3, -1]), np.array([4, 4])],
        advantages=[floats([0.5, 0.25, 0.5]), floats([-1.5, -1.5])],
        weights=[floats([1, 0.5, 0]), floats([0, 0])],
        mini_batch=np.array([0, 0]),
        groups=np.array([0, 1]),
    )


def test_pack_by_hand():
    packed = pack(make_batch(), [0, 1], multiple=4)
    assert packed.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 0, 0]
    assert packed.labels.tolist() == [11, 12, 13, 14, 21, 22, 0, 0]
    assert packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 4, 6, 8]
    assert packed.rows.tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert packed.response.tolist() == [False, True, True, True, True, True, False, False]
    # The second sample has weight 0: it is scored, but not in the loss.
    assert packed.weights.tolist() == [0, 1, 0.5, 0, 0, 0, 0, 0]
    assert packed.mask.tolist() == [False, True, True, False, False, False, False, False]
    assert packed.rollout_logprobs.tolist() == [0, -1, -2, -3, -4, -5, 0, 0]
    assert packed.versions.tolist() == [-1, 3, 3, -1, 4, 4, -1, -1]
    assert packed.sampled.tolist() == [False, True, True, False, True, True, False, False]
    assert packed.advantages.tolist() == [0, 0.5, 0.25, 0.5, -1.5, -1.5, 0, 0]
    assert packed.sample_of.tolist() == [0, 0, 0, 0, 1, 1, -1, -1]
    assert packed.counted.tolist() == [True] * 6 + [False] * 2


def test_empty_micro_batch_has_one_step_of_padding_and_nothing_in_the_loss():
    packed = pack(make_batch(), [], multiple=2)
    assert len(packed.input_ids) == 2
    assert not packed.mask.any() and not packed.counted.any()


def test_unpack_returns_the_response_tokens_of_each_sample():
    packed = pack(make_batch(), [1, 0], multiple=1)
    values = unpack(packed, np.arange(6.0))
    assert values[1].tolist() == [0, 1]
    assert values[0].tolist() == [3, 4, 5]


def test_sequences_to_score_count_every_token_after_the_first():
    batch = TrainBatch.from_sequences([[1, 2, 3], [4, 5]])
    packed = pack(batch, [0, 1], multiple=1)
    assert packed.mask.all()
    assert packed.labels.tolist() == [2, 3, 5]


def test_a_sample_longer_than_the_limit_goes_alone():
    plan = plan_micro_batches(range(3), np.array([100, 3, 4]), 10, 1)
    assert [0] in plan[0]


@pytest.mark.parametrize("dp", [2, 3])
def test_fewer_samples_than_ranks_leave_empty_micro_batches(dp):
    plan = plan_micro_batches([0], np.array([5]), 10, dp)
    assert sum(bool(chunk) for rank in plan for chunk in rank) == 1
    assert all(len(rank) == 1 for rank in plan)


def test_groups_go_to_mini_batches_whole():
    def group(size):
        segments = (Segment.given("user", [1]), Segment.sampled([2, 3], np.zeros(2), 0))
        return Group(Prompt(0, "", [1]), [Sample(segments, "stop", "")] * size, None, np.ones(size))

    groups = [group(2), group(3), group(1), group(2)]
    signals = [Signal.of_samples(g, np.zeros(len(g.samples))) for g in groups]
    batch = TrainBatch.from_groups(groups, signals, mini_batches=2, step=7)
    assert batch.mini_batch.tolist() == [0] * 5 + [1] * 3 and batch.step == 7
    assert len(batch.token_ids) == len(batch.weights) == 8
