"""Advantages that wait for the forwards before the update: a KL that is taken from rewards, values
of a critic.

Each data-parallel rank knows the logprobs and values of its own samples, and an advantage compares
samples of all: what is known is put together on every rank, which all compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from lora_moe_rl.algorithms.base import Known, Pass
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import stream_of, unpack
from lora_moe_rl.trainer.engine import TrainingEngine, Work
from lora_moe_rl.trainer.meter import Meter


def revise(
    engine: TrainingEngine, batch: TrainBatch, works: Sequence[Work], meter: Meter
) -> list[np.ndarray] | None:
    """Puts the algorithm's own advantages into the micro-batches, and what its critic is to learn,
    if it revises any; returns them, float32 [R] of each sample of the step. Called after the
    forwards before the update, with all works of the step. Raises ValueError for a batch without
    rewards."""
    algorithm = engine.algorithm
    if not algorithm.revises:
        return None
    if batch.rewards is None:
        raise ValueError("the algorithm revises its advantages, but its signals had no rewards")
    made = {name: everywhere(name, batch, works, meter) for name in sorted(algorithm.passes)}
    told = {"kl_coef": batch.kl_coef, "earlier": batch.earlier}
    known = Known(batch.rewards, batch.groups, batch.masks, **made, **told)
    advantages = [one.astype(np.float32) for one in algorithm.revised(known)]
    meter.of_step = algorithm.revised_metrics(known)
    rewards = [
        np.full(len(mask), reward, np.float32)
        for mask, reward in zip(batch.masks, batch.rewards, strict=True)
    ]
    revised = replace(batch, advantages=advantages)
    for work in works:
        work.data = replace(work.data, batch=revised)
        work.known["rewards"] = torch.from_numpy(stream_of(work.data, rewards))
    if algorithm.critic is not None:
        returns = algorithm.returns(known)
        for work in works:
            work.known["returns"] = torch.from_numpy(stream_of(work.data, returns))
    return advantages


def everywhere(
    name: Pass, batch: TrainBatch, works: Sequence[Work], meter: Meter
) -> list[np.ndarray]:
    """What a forward gave the response tokens of every sample of the step, float64 [R], on every
    rank."""
    return of_every_sample(lambda work: work.known[name].cpu().numpy(), batch, works, meter)


def of_every_sample(
    stream: Callable[[Work], np.ndarray], batch: TrainBatch, works: Sequence[Work], meter: Meter
) -> list[np.ndarray]:
    """A stream, [T] of each micro-batch, as it is for the response tokens of every sample of the
    step, float64 [R], on every rank. Asked of the ranks that report."""
    found = [np.zeros(size) for size in batch.response_sizes().tolist()]
    for work in works if meter.reports else ():
        for sample, values in unpack(work.data, stream(work)).items():
            found[sample][:] = values
    ends = np.cumsum([len(one) for one in found])
    whole = np.array(meter.all_reduce(np.concatenate(found).tolist()))
    return np.split(whole, ends[:-1])
