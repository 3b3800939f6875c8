"""Which tokens of each optimizer step the algorithm selects, when it is known which of them stay in
its loss.

Each data-parallel rank knows its own samples, and a selection is by a statistic over all: what is
known is put together on every rank, in the order of the samples, and all select the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from lora_moe_rl.algorithms.parts.selection import Selection, StepTokens, lots_of
from lora_moe_rl.data.batch import TrainBatch
from lora_moe_rl.data.packing import stream_of
from lora_moe_rl.trainer.advantages import of_every_sample
from lora_moe_rl.trainer.engine import TrainingEngine, Work
from lora_moe_rl.trainer.meter import Meter

STREAMS: dict[str, Callable[[Work], np.ndarray]] = {
    "logprobs": lambda work: work.known["old"].cpu().numpy(),
    "rollout": lambda work: work.data.rollout_logprobs,
    "advantages": lambda work: work.data.advantages,
}


def select_tokens(
    engine: TrainingEngine,
    batch: TrainBatch,
    steps: Sequence[np.ndarray],
    works: Sequence[Work],
    meter: Meter,
) -> None:
    """Adds `known["selected"]`, float32 [T], to the works of a step, if the algorithm selects any,
    and tells the meter its metrics. steps: the samples of each optimizer step. Called after
    `choose_tokens`. Raises ValueError for a selection of another shape."""
    algorithm = engine.algorithm
    if not algorithm.selects:
        return
    streams = dict(STREAMS)
    if algorithm.selects_by_entropy:
        streams["entropy"] = lambda work: work.known["entropy"].cpu().numpy()
    every = {n: of_every_sample(one, batch, works, meter) for n, one in streams.items()}
    masks = of_every_sample(lambda work: work.mask, batch, works, meter)
    selected = [np.zeros(size, np.float32) for size in batch.response_sizes().tolist()]
    found = []
    for samples in steps:
        mine = [i for i in samples.tolist() if batch.copies[i] and masks[i].any()]
        if not mine:
            continue
        inside = {i: np.flatnonzero(masks[i]) for i in mine}
        tokens = _tokens(engine.config.seed, batch, every, inside)
        selection = algorithm.select(tokens)
        _check(selection, tokens, type(algorithm).__name__)
        found.append(selection.metrics)
        sizes = [batch.copies[i] * len(inside[i]) for i in mine]
        parts = np.split(selection.tokens, np.cumsum(sizes)[:-1])
        for i, part in zip(mine, parts, strict=True):
            selected[i][inside[i]] = part.reshape(batch.copies[i], -1).mean(axis=0)
    for work in works:
        work.known["selected"] = torch.from_numpy(stream_of(work.data, selected))
    for name in found[0] if found else ():
        meter.of_step[f"loss/{name}"] = float(np.mean([one[name] for one in found]))


def _tokens(
    seed: int,
    batch: TrainBatch,
    every: dict[str, list[np.ndarray]],
    inside: dict[int, np.ndarray],
) -> StepTokens:
    """inside: by the number of a sample, the places of its tokens in the loss."""
    streams = {
        name: np.concatenate([np.tile(values[i][at], batch.copies[i]) for i, at in inside.items()])
        for name, values in every.items()
    }
    lots = [
        lots_of(seed, batch.step, i, batch.copies[i], len(every["logprobs"][i]))[:, at].ravel()
        for i, at in inside.items()
    ]
    return StepTokens(**streams, old=streams["logprobs"], lots=np.concatenate(lots))


def _check(selection: Selection, tokens: StepTokens, name: str) -> None:
    chosen = selection.tokens
    if chosen.shape != tokens.logprobs.shape or chosen.dtype != bool:
        raise ValueError(
            f"{name}.select returned {chosen.dtype} of shape {chosen.shape} for "
            f"{len(tokens.logprobs)} tokens; bool, one of each, is wanted"
        )
