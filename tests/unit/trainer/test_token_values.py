"""Values of single tokens, out of micro-batches in any order and on any rank, at their tokens."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import pack
from lora_moe_rl.trainer.token_values import Kept

PROMPTS, LENGTHS = (1, 3, 2, 1, 2), (5, 4, 9, 2, 6)
# By rank, its micro-batches: in the order of the step, and as a plan may have them.
PLANS = [[[[0, 1, 2, 3, 4]]], [[[4, 1], [3]], [[2], [0]]], [[[], [2, 0]], [[3, 4, 1], []]]]


def batch_of(splits=None) -> TrainBatch:
    ids = [np.arange(n) + 100 * i for i, n in enumerate(LENGTHS)]
    batch = TrainBatch.from_sequences(ids, PROMPTS)
    batch.splits = splits or {}
    return batch


def logprobs_of(data) -> torch.Tensor:
    """What a model says of each token: here its id, so that a token tells whose value it has."""
    return torch.from_numpy(data.labels).float()


def gathered(plan, batch, samples, again=False):
    """By sample, what every rank has in the end. `again`: with a second pass, of other values."""
    ranks = [Kept(batch, samples) for _ in plan]
    for kept, micro_batches in zip(ranks, plan, strict=True):
        for numbers in micro_batches:
            data = pack(batch, numbers, multiple=4)
            kept.take(data, logprobs_of(data), -logprobs_of(data))
            if again:
                kept.take(data, logprobs_of(data) + 0.5, logprobs_of(data))
    sums: list[list[float]] = []
    meter = SimpleNamespace(reports=True, all_reduce=lambda values: sums.append(values) or values)
    for kept in ranks:
        with contextlib.suppress(ValueError):  # one rank alone does not have all
            kept.everywhere(meter)
    meter.all_reduce = lambda values: np.sum(sums, axis=0).tolist()
    return ranks[0].everywhere(meter)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("splits", [None, {2: (5,), 4: (3, 5)}])
@pytest.mark.parametrize("again", [False, True])
def test_every_token_has_its_own_values_however_samples_are_packed(plan, splits, again):
    samples, batch = [0, 2, 4], batch_of(splits)
    found = gathered(plan, batch, samples, again)
    assert list(found) == samples
    for sample in samples:
        own = batch.token_ids[sample][PROMPTS[sample] :]
        assert found[sample].logprobs.tolist() == own.tolist()
        assert found[sample].entropy.tolist() == (-own).tolist()


def test_a_sample_that_no_rank_had_or_two_had_is_an_error_and_not_a_zero():
    for plan in ([[[0, 1]]], [[[0, 2]], [[2]]]):
        with pytest.raises(ValueError, match="ranks had the tokens of sample 2, not one"):
            gathered(plan, batch_of(), [0, 2])


def test_where_nothing_is_kept_ranks_exchange_nothing():
    def unexpected(values):
        raise AssertionError("an exchange")

    kept = Kept(batch_of(), [])
    data = pack(batch_of(), [0], multiple=4)
    kept.take(data, None, None)  # type: ignore[arg-type]  # are not looked at
    assert kept.everywhere(SimpleNamespace(reports=True, all_reduce=unexpected)) == {}
