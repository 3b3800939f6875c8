"""What a group of samples may be."""

from __future__ import annotations

import numpy as np
import pytest

from lora_moe_rl.data.samples import Group, Prompt, Sample, Segment

SAMPLE = Sample((Segment.given("user", [1]), Segment.sampled([2], np.zeros(1), 0)), "stop", "x")


@pytest.mark.parametrize(
    "rewards", [np.zeros(1), np.zeros(3), np.zeros((2, 1)), np.float32(0.5), None]
)
def test_an_environment_gives_every_sample_one_reward(rewards):
    with pytest.raises(ValueError, match=r"prompt 4: rewards of shape .* for 2 samples; a group"):
        Group(Prompt(4, "?", [1]), [SAMPLE, SAMPLE], None, rewards)
