"""Which samples go together in a micro-batch, on which rank. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from heapq import heapreplace
from itertools import chain
from typing import NamedTuple

import numpy as np

from lora_moe_rl.config import TrainerConfig
from lora_moe_rl.data.batch import TrainBatch

EVEN = 1.05  # the busiest rank's tokens over the mean, from which on smaller parts are tried


def plan_for(
    trainer: TrainerConfig, samples: Sequence[int] | np.ndarray, batch: TrainBatch, dp_size: int
) -> list[list[list[int]]]:
    """As the trainer's layout wants them: the interleaved schedule goes through micro-batches in
    groups of pp.

    Samples that begin alike stay together, as far as that leaves the busiest ranks less to do: all
    of them, or halves, quarters, down to each by itself, which spread evenly however few there are.
    """
    multiple = trainer.pp if trainer.vpp > 1 else 1
    limits = trainer.micro_batch_tokens, dp_size, multiple
    lengths = batch.lengths()
    if batch.alike is None:
        return plan_micro_batches(samples, lengths, *limits)
    best, least = None, math.inf
    size = int(np.unique(batch.alike[samples], return_counts=True)[1].max(initial=1))
    while True:
        units = _units(samples, lengths, batch, trainer.micro_batch_tokens, size)
        plan = plan_micro_batches(np.arange(len(units.samples)), units.tokens, *limits)
        busiest = _busiest(plan, units.tokens)
        if busiest < least:
            best, least = (units, plan), busiest
        if size == 1 or busiest * dp_size <= EVEN * units.tokens.sum():
            break
        size = -(-size // 2)
    assert best is not None
    units, plan = best
    return [[sorted(chain(*(units.samples[u] for u in one))) for one in rank] for rank in plan]


class _Units(NamedTuple):
    """Samples that go to a micro-batch together, and the tokens fed of each unit, int64."""

    samples: list[list[int]]
    tokens: np.ndarray


def _units(
    samples: Sequence[int] | np.ndarray,
    lengths: np.ndarray,
    batch: TrainBatch,
    max_tokens: int,
    most: int,
) -> _Units:
    """Up to `most` samples that begin alike, of up to `max_tokens` tokens together."""
    assert batch.alike is not None
    made: list[list[int]] = []
    tokens: list[int] = []
    newest: dict[int, int] = {}  # by the first of those that begin alike, the unit that takes more
    numbers = np.asarray(samples, dtype=np.int64)
    every = (numbers, lengths[numbers], batch.prompt_lengths[numbers], batch.alike[numbers])
    for sample, length, prompt, first in zip(*(one.tolist() for one in every), strict=True):
        unit = newest.get(first)
        more = length - prompt
        if unit is None or len(made[unit]) == most or tokens[unit] + more > max_tokens:
            newest[first] = len(made)
            made.append([sample])
            tokens.append(length)
        else:
            made[unit].append(sample)
            tokens[unit] += more
    return _Units(made, np.array(tokens, dtype=np.int64))


def _busiest(plan: list[list[list[int]]], tokens: np.ndarray) -> int:
    """Tokens of the longest micro-batch of any rank, one after the other: expert parallelism has
    ranks wait for each other in each."""
    return sum(max(int(tokens[one].sum()) for one in together) for together in zip(*plan))


def plan_micro_batches(
    samples: Sequence[int] | np.ndarray,
    lengths: np.ndarray,
    max_tokens: int,
    dp_size: int,
    multiple: int = 1,
) -> list[list[list[int]]]:
    """`plan[dp_rank]` is that rank's micro-batches, each a list of sample numbers.

    All ranks get the same number of micro-batches, a multiple of `multiple`, since expert
    parallelism makes them meet in each. Longest first into the emptiest micro-batch, of as few as
    can be; a sample longer than max_tokens has one of its own. With fewer samples than ranks some
    micro-batches are empty.
    """
    numbers = np.asarray(samples, dtype=np.int64)
    order = numbers[np.lexsort((numbers, -lengths[numbers]))]
    count, places = _fewest(lengths[order], max_tokens, dp_size * multiple)
    bins: list[list[int]] = [[] for _ in range(count)]
    for sample, number in zip(order.tolist(), places, strict=True):
        bins[number].append(sample)
    return [[sorted(b) for b in bins[rank::dp_size]] for rank in range(dp_size)]


def _fewest(sizes: np.ndarray, max_tokens: int, unit: int) -> tuple[int, array[int]]:
    """The fewest micro-batches, in steps of `unit`, that hold samples of `sizes`, longest first;
    and the one that each is in.

    As `_emptiest_first` fills them, one more never makes the fullest any fuller: where some number
    is enough every larger one is, so that the fewest are found by halving.
    """
    fed = sizes[sizes > 0]
    most = np.maximum(1, max_tokens // fed)  # of those at least as long, in one micro-batch
    needed = -(-np.arange(1, len(fed) + 1) // most)
    least = max(math.ceil(int(sizes.sum()) / max_tokens), int(needed.max(initial=1)))
    too_few, enough = math.ceil(least / unit) - 1, math.ceil(least / unit)
    known = sizes.tolist()
    while (found := _emptiest_first(known, enough * unit, max_tokens)) is None:
        too_few, enough = enough, 2 * enough - too_few
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if (fewer := _emptiest_first(known, middle * unit, max_tokens)) is None:
            too_few = middle
        else:
            enough, found = middle, fewer
    return enough * unit, found


def _emptiest_first(sizes: list[int], count: int, max_tokens: int) -> array[int] | None:
    """The micro-batch of each sample when one after the other goes into the emptiest of `count`;
    None when several samples of one would be more than max_tokens."""
    heap = list(range(count))  # tokens * count + the number of the micro-batch
    places = array("q")
    for size in sizes:
        tokens, number = divmod(heap[0], count)
        if tokens and tokens + size > max_tokens:
            return None
        places.append(number)
        heapreplace(heap, heap[0] + size * count)
    return places
