"""What a group of samples may be."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from lora_moe_rl.data.samples import STREAMS, Group, Prompt, Sample, Segment

SAMPLE = Sample((Segment.given("user", [1]), Segment.sampled([2], np.zeros(1), 0)), "stop", "x")


@pytest.mark.parametrize(
    "rewards", [np.zeros(1), np.zeros(3), np.zeros((2, 1)), np.float32(0.5), None]
)
def test_an_environment_gives_every_sample_one_reward(rewards):
    with pytest.raises(ValueError, match=r"prompt 4: rewards of shape .* for 2 samples; a group"):
        Group(Prompt(4, "?", [1]), [SAMPLE, SAMPLE], None, rewards)


def test_a_sample_is_the_same_after_it_has_travelled():
    """Also one that somebody made of lists' default dtypes."""
    policy = Segment.sampled([4, 5], np.array([-0.25, -1.5]), version=3)
    wide = Segment("tool", np.arange(3), np.zeros(3, bool), np.zeros(3), np.full(3, -1))
    sample = Sample((Segment.given("user", [1, 2, 3]), policy, wide), "stop", "text", splits=(4,))
    there = pickle.loads(pickle.dumps(sample))
    assert (there.finish_reason, there.text, there.splits) == ("stop", "text", (4,))
    assert [segment.author for segment in there.segments] == ["user", "policy", "tool"]
    for segment, sent in zip(there.segments, sample.segments, strict=True):
        for name, dtype in STREAMS.items():
            assert getattr(segment, name).dtype == dtype
            np.testing.assert_array_equal(getattr(segment, name), getattr(sent, name))
