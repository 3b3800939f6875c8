"""What `verify async` makes of samples: a token is compared under the version that it carries."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lora_moe_rl.data.samples import Sample, Segment
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.verify import in_flight
from lora_moe_rl.verify.in_flight_run import Sampled


def sampled(*versions: list[int]) -> Sampled:
    """Adapters 0 and 1 are versions 4 and 5; a token of version v has logprob -v."""
    samples = []
    for of_sample in versions:
        segments = [Segment.sampled([7], np.array([-one], "f4"), one) for one in of_sample]
        samples.append(Sample((Segment.given("user", [1]), *segments), "stop", ""))
    return Sampled(samples, None, [4, 5])


def scores(sizes: list[int], *values: float) -> list[list[np.ndarray]]:
    return [[np.full(size, value, np.float32) for size in sizes] for value in values]


def test_each_token_is_compared_under_its_own_version():
    found = sampled([4, 4, 5], [5])
    assert found.apart(scores([3, 1], -4, -5)) == 0
    assert found.apart(scores([3, 1], -5, -4)) == 1
    assert found.apart(scores([3, 1], -4, -7), slice(0, 1)) == 0
    assert found.apart(scores([3, 1], -4, -7), slice(1, None)) == 2
    assert math.isnan(found.apart(scores([3, 1], -4, math.nan)))
    assert math.isnan(sampled([4]).apart(scores([1], -4, -5), slice(1, None)))
    assert (found.continued, found.unknown) == (1, 0)


def test_tokens_of_a_version_that_nobody_published_are_counted():
    assert sampled([4, 6, 6]).unknown == 2


def test_a_setting_that_is_not_read_is_refused():
    with pytest.raises(ConfigError, match="verify async does not read 'trainer.tp=2'"):
        in_flight.main(["--model", "qwen3_moe", "trainer.tp=2"])
