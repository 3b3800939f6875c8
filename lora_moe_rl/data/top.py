"""What a model finds likely at each place. Plain numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Top:
    """The likeliest tokens at each of n places, the likeliest first: token_ids int32 [n, k],
    logprobs float32 [n, k]. At a place without any, as the first token of a prompt, they are -1 and
    NaN; a token that could not be sampled there has -inf."""

    token_ids: np.ndarray
    logprobs: np.ndarray
