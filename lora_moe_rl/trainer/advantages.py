"""Advantages that wait for the forwards before the update: a KL that is taken from rewards.

Each data-parallel rank knows the logprobs of its own samples, and an advantage compares samples of
all: what is known is put together on every rank, which all compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_moe_rl.algorithms.base import Known
from lora_moe_rl.data.batch import TrainBatch, unpack, with_advantages
from lora_moe_rl.data.samples import NOT_SAMPLED
from lora_moe_rl.trainer.engine import TrainingEngine, Work
from lora_moe_rl.trainer.meter import Meter


def revise(engine: TrainingEngine, batch: TrainBatch, works: Sequence[Work], meter: Meter) -> None:
    """Puts the algorithm's own advantages into the micro-batches, if it revises any. Called after
    the forwards before the update, with all works of the step. Raises ValueError for a batch
    without rewards."""
    if not engine.algorithm.revises:
        return
    if batch.rewards is None:
        raise ValueError("the algorithm revises its advantages, but its signals had no rewards")
    known = Known(
        batch.rewards,
        batch.groups,
        [versions != NOT_SAMPLED for versions in batch.versions],
        old=_everywhere("old", batch, works, meter),
        reference=_everywhere("reference", batch, works, meter),
    )
    advantages = engine.algorithm.revised(known)
    for work in works:
        work.data = with_advantages(work.data, advantages)


def _everywhere(
    name: str, batch: TrainBatch, works: Sequence[Work], meter: Meter
) -> list[np.ndarray]:
    """Logprobs of the response tokens of every sample of the step, float64 [R], on every rank."""
    found = [np.zeros(len(weights)) for weights in batch.weights]
    for work in works if meter.reports else ():
        for sample, values in unpack(work.data, work.known[name].cpu().numpy()).items():
            found[sample][:] = values
    ends = np.cumsum([len(one) for one in found])
    whole = np.array(meter.all_reduce(np.concatenate(found).tolist()))
    return np.split(whole, ends[:-1])
