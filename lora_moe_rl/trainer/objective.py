"""What stays in the loss, and how tokens become the loss of an optimizer step.

data.weights > 0  and  routes are there, if replay.missing=mask  and  algorithm.keep
                       ──> the mask of each micro-batch, and how many tokens of each sample stay
algorithm.averaged     ──> a mean over the step, before algorithm.keep, or after (averages_kept)
those counts, over all ranks  ──aggregation──> a scale a sample, and one divisor; the samples of
                       a conversation that forked count as one

A sample that stands in the loss several times counts so often wherever there is a sum or a mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lora_moe_rl.algorithms.base import Algorithm, Loss, Tokens
from lora_moe_rl.algorithms.parts.aggregation import Scales, aggregate
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.kernels.backend import on_device
from lora_moe_rl.trainer.engine import TrainingEngine, Work
from lora_moe_rl.trainer.meter import Meter


def choose_tokens(
    engine: TrainingEngine, batch: TrainBatch, works: Sequence[Work], meter: Meter
) -> np.ndarray:
    """Sets the mask and the step's mean of each micro-batch. Returns int64 [n], the tokens of each
    sample of the step that stay in the loss, the same on every rank. Called after the forwards
    before the update."""
    algorithm = engine.algorithm
    kept, sums = np.zeros(len(batch)), np.zeros(2)
    averaged: list[torch.Tensor] = []
    for work in works:
        data = work.data
        work.mask = data.mask
        if work.complete is not None and engine.config.replay.missing == "mask":
            work.mask = work.mask & work.complete
        meter.add("masked", data.copies[data.mask & ~work.mask].sum())
        averages = algorithm.averages and engine.is_last_stage
        if averages and not algorithm.averages_kept:
            averaged.append(_averaged(algorithm, work))
        if algorithm.rejects and engine.is_last_stage:
            stay = algorithm.keep(tokens_of(work, work.known["old"])).cpu().numpy()
            meter.add("rejected", data.copies[work.mask & ~stay].sum())
            work.mask = work.mask & stay
        if averages and algorithm.averages_kept:
            averaged.append(_averaged(algorithm, work))
        kept[list(data.samples)] += np.bincount(data.places[work.mask], minlength=len(data.samples))
    for pair in torch.stack(averaged).tolist() if averaged else ():
        sums += pair
    here = np.append(kept, sums) if meter.reports else np.zeros(len(kept) + 2)
    *every, total, count = meter.all_reduce(here.tolist())
    for work in works:
        work.step_mean = total / max(count, 1.0) if algorithm.averages else None
    return np.array(every).astype(np.int64)


def _averaged(algorithm: Algorithm, work: Work) -> torch.Tensor:
    """float64 [2], the sums of the two streams over the tokens of the work's mask."""
    tokens = tokens_of(work, work.known["old"])
    times = on_device(torch.from_numpy(work.stands), tokens.mask.device)
    inside = [one.where(tokens.mask, 0) * times.to(one) for one in algorithm.averaged(tokens)]
    return torch.stack([one.sum(dtype=torch.float64) for one in inside])


def scales_of(
    engine: TrainingEngine, batch: TrainBatch, kept: np.ndarray, samples: np.ndarray
) -> Scales:
    """The scales of the optimizer step on `samples`; kept: see `choose_tokens`."""
    mine = np.zeros_like(kept)
    mine[samples] = kept[samples]
    config = engine.config
    how, longest = config.algorithm.aggregation, config.max_response_tokens
    return aggregate(how, mine, batch.groups, batch.copies, longest, batch.conversations)


def tokens_of(
    work: Work,
    logprobs: torch.Tensor,
    entropy: torch.Tensor | None = None,
    divergence: torch.Tensor | None = None,
) -> Tokens:
    """What an algorithm sees of a micro-batch: 0 wherever a token is not in the loss."""
    data, device = work.data, logprobs.device
    mask = on_device(torch.from_numpy(work.mask), device)

    def inside(values: np.ndarray | torch.Tensor) -> torch.Tensor:
        if isinstance(values, np.ndarray):
            values = on_device(torch.from_numpy(values), device)
        return values.where(mask, 0)

    reference, rewards = work.known.get("reference"), work.known.get("rewards")
    selected = work.known.get("selected")
    return Tokens(
        mask=mask,
        logprobs=inside(logprobs),
        old=inside(work.known.get("old", logprobs.detach())),
        rollout=inside(data.rollout_logprobs),
        reference=None if reference is None else inside(reference),
        advantages=inside(data.advantages),
        versions=inside(data.versions),
        samples=on_device(torch.from_numpy(data.places), device),
        num_samples=len(data.samples) + 1,
        step_mean=work.step_mean,
        rewards=None if rewards is None else inside(on_device(rewards, device)),
        entropy=None if entropy is None else inside(entropy),
        kl_coef=data.batch.kl_coef,
        selected=None if selected is None else inside(on_device(selected, device)),
        divergence=None if divergence is None else inside(divergence),
    )


def total_of(loss: Loss, work: Work, tokens: Tokens, scales: Scales) -> torch.Tensor:
    """The summed loss of a micro-batch, before it is divided by the step's divisor."""
    data = work.data
    scale = scales.of_sample[np.asarray(data.samples, dtype=np.int64)]
    factor = data.weights * np.append(scale, np.float32(0))[data.places]
    factors = on_device(torch.from_numpy(factor), loss.values.device).to(loss.values.dtype)
    return (loss.values.where(tokens.mask, 0) * factors).sum()
