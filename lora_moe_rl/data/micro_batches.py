"""Which samples go together in a micro-batch, on which rank. Pure."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from heapq import heapreplace

import numpy as np

from lora_moe_rl.config import TrainerConfig


def plan_for(
    trainer: TrainerConfig, samples: Sequence[int] | np.ndarray, lengths: np.ndarray, dp_size: int
) -> list[list[list[int]]]:
    """As the trainer's layout wants them: the interleaved schedule goes through micro-batches in
    groups of pp."""
    multiple = trainer.pp if trainer.vpp > 1 else 1
    return plan_micro_batches(samples, lengths, trainer.micro_batch_tokens, dp_size, multiple)


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
