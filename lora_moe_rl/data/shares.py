"""What each data-parallel rank is sent of a step: the samples that it trains."""

from __future__ import annotations

from itertools import chain

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.micro_batches import plan_for


def shares(batch: TrainBatch, config: RunConfig) -> list[TrainBatch]:
    """The share of each data-parallel rank. The ranks plan their micro-batches as it is done here,
    and come to the same samples; one that would want another's raises ValueError. An algorithm that
    revises its advantages compares samples of all ranks, and gets the masks of all."""
    trainer = config.trainer
    if trainer.dp == 1:
        return [batch]
    found: list[list[int]] = [[] for _ in range(trainer.dp)]
    for samples in batch.of_mini_batches(config.algorithm.mini_batches):
        for mine, plan in zip(found, plan_for(trainer, samples, batch, trainer.dp), strict=True):
            mine += chain.from_iterable(plan)
    known, masks = batch.known(), algorithms.make(config).revises
    return [batch.share(samples, known, masks) for samples in found]
