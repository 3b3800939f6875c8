"""What an update of the trainer answers. Plain numpy, as `data/samples.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class TokenValues:
    """What the trainer's update knew of a sample's tokens after the prompt, all float32 [R]:
    `logprobs` under the adapter before the update, at the rollout's temperature; `entropy` of the
    distributions they come from, in nats, of the sample's first forward in the update."""

    logprobs: np.ndarray
    entropy: np.ndarray


@dataclass(frozen=True)
class UpdateResult:
    """What one step's update did; the same on every rank.

    `version` is the adapter's after the update; `skipped` counts optimizer steps left out (NaN,
    inf, or no token in the loss), `nonfinite` those of NaN or inf, a critic's too. `advantages`: of
    an algorithm that revises them, float32 [R] of each sample, from the first rank; None of others.
    `tokens`: of the samples that `data/kept.py` names, by their numbers in the step.
    `expert_loads`: int64 [MoE layers, experts], how often each expert was chosen for the step's
    tokens, in each epoch; None of a dense model. `peak_gib`: the most memory that any rank has
    held (telemetry/peak.py).
    """

    version: int
    metrics: dict[str, float]
    skipped: int
    nonfinite: int
    seconds: float
    advantages: list[np.ndarray] | None = None
    tokens: dict[int, TokenValues] = field(default_factory=dict)
    expert_loads: np.ndarray | None = None
    peak_gib: float = 0.0
