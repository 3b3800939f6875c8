"""Reward functions called as a run calls them, on samples made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lora_moe_rl.config import RewardFunction
from lora_moe_rl.data.samples import Sample, Segment
from lora_moe_rl.rewards.runner import RewardRunner


def runner_of(
    function: str | Path, timeout_s: float, workers: int = 2, **args: Any
) -> RewardRunner:
    """A runner of a function that is alone, in a run of 40 optimizer steps."""
    one = RewardFunction("reward.function", str(function), args)
    return RewardRunner(one, timeout_s, 40, workers)


def sample_of(tokens: int, text: str, version: int = 0) -> Sample:
    response = Segment.sampled([1] * tokens, np.zeros(tokens), version)
    return Sample((Segment.given("user", [1]), response), "stop", text)
