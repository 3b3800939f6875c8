"""What an engine tells of a request that is no sample of a run: more of each token than is trained
on. Plain numpy, as all in here.

Shape letters: R sampled tokens, P tokens of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lora_moe_rl.data.samples import Sample
from lora_moe_rl.data.top import Top


@dataclass(frozen=True)
class Told:
    """A sample, the likeliest tokens at its R places if they were asked for, and how many tokens of
    its prompt the engine did not compute anew."""

    sample: Sample
    top: Top | None
    cached: int


@dataclass(frozen=True)
class ToldPrompt:
    """Logprobs of a prompt's tokens at temperature 1, float32 [P], NaN of the first; the likeliest
    at its P places if they were asked for."""

    logprobs: np.ndarray
    top: Top | None
