"""Which samples of a step are kept."""

from lora_moe_rl.config import LoggingConfig
from lora_moe_rl.data.kept import spread, with_tokens


def test_samples_are_spread_evenly():
    assert spread(10, 4) == [0, 2, 5, 7]
    assert spread(3, 4) == [0, 1, 2]
    assert spread(3, 0) == []


def test_tokens_are_of_the_samples_that_are_written_where_they_are_asked_for():
    assert with_tokens(LoggingConfig(samples_per_step=2), 8) == []
    assert with_tokens(LoggingConfig(samples_per_step=2, tokens=True), 8) == [0, 4]
