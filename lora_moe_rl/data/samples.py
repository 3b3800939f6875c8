"""The data that moves in one step. Plain numpy: no torch, Ray, Megatron or vLLM in here.

Shape letters: L tokens of one sample (prompt and response), R response tokens, M MoE layers,
K experts a token (top-k).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One row of the data.

    `columns` are the row's own values, given to the reward as keywords; `row` counts the prompts
    drawn since the run began.
    """

    row: int
    text: Any  # str, or a list of {"role", "content"}
    token_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """One response. Token ids in, token ids out: nothing is ever re-tokenised."""

    group: int  # index of the prompt within the step
    prompt_ids: np.ndarray  # int32 [L - R]
    response_ids: np.ndarray  # int32 [R], with the token that ended it
    logprobs: np.ndarray  # float32 [R], of the sampling distribution (temperature applied)
    versions: np.ndarray  # int32 [R], the adapter version that produced each token
    finish_reason: Literal["stop", "length", "abort"]
    text: str  # the response, decoded, without special tokens

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [L]."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True)
class UpdateResult:
    """What one step's update did; the same on every rank.

    `version` is the adapter's after the update; `skipped` counts optimizer steps left out (NaN,
    inf, or no token in the loss), `nonfinite` those of NaN or inf.
    """

    version: int
    metrics: dict[str, float]
    skipped: int
    nonfinite: int
    seconds: float
