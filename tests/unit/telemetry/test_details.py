"""What trackers are shown of a step, by hand."""

from __future__ import annotations

import numpy as np

from lora_moe_rl.algorithms.base import Signal
from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment
from lora_moe_rl.telemetry import names
from lora_moe_rl.telemetry.details import of_step


def test_advantages_are_those_of_the_tokens_that_are_learned_from():
    """Not of a tool's token, nor of a sample without a reward."""
    turns = Segment.sampled([7, 8], np.zeros(2), 0), Segment.given("tool", [9])
    samples = [Sample((Segment.given("user", [5]), *turns), "stop", "")] * 2
    group = Group(Prompt(0, "", [5]), samples, None, np.array([1.0, np.nan], np.float32))
    weights = [np.array([1, 1, 0], np.float32), np.zeros(3, np.float32)]
    signal = Signal([np.array([2, 3, 0], np.float32), np.zeros(3, np.float32)], weights)
    found = of_step([], [group], [signal]).histograms
    assert found[names.ADVANTAGE_HISTOGRAM].tolist() == [2, 3]
    assert found[names.REWARD_HISTOGRAM].tolist() == [1]
    assert found[names.LENGTH_HISTOGRAM].tolist() == [3, 3]
