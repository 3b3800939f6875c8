"""The simulated run against sums by hand."""

import pytest

from lora_moe_rl.run.schedule import Schedule
from lora_moe_rl.run.simulation import Stages, simulate


def stages(lengths, token=1.0, sequence=0.0, reward=0.0, update=3.0, publish=1.0) -> Stages:
    return Stages(lengths, token, sequence, reward, update, publish)


@pytest.mark.parametrize(
    ("made", "engines", "lag", "step_s", "idle_trainer", "idle_engines"),
    [
        # In turns: 4 s of sampling, 4 s of training.
        (stages([4]), 1, 0, 8, 1 / 2, 1 / 2),
        # At once: both take 4 s.
        (stages([4]), 1, 1, 4, 0, 0),
        # A group holds its slot for 6 s of sampling and 4 s of training; there are four slots.
        (stages([6]), 1, 1, 5, 1 / 5, 0),
        # Training takes 4 s, sampling 1 s.
        (stages([1]), 1, 1, 4, 0, 3 / 4),
        # Two groups share an engine, whose step then takes 2 s: 4 tokens are there after 8 s.
        (stages([4], token=0, sequence=1), 1, 0, 12, 2 / 3, 1 / 3),
        # An engine for each: 4 s.
        (stages([4], token=0, sequence=1), 2, 0, 8, 1 / 2, 1 / 2),
        # The reward's 2 s come after sampling, and no engine works in them.
        (stages([4], reward=2), 1, 0, 10, 6 / 10, 6 / 10),
        # One of two is long: in turns the step waits for it.
        (stages([1, 8]), 1, 0, 12, 8 / 12, 4 / 12),
    ],
)
def test_by_hand(made, engines, lag, step_s, idle_trainer, idle_engines):
    """Two groups a step."""
    found = simulate(Schedule(2, lag), made, engines)
    assert found.step_s == pytest.approx(step_s)
    assert found.idle_trainer == pytest.approx(idle_trainer, abs=1e-9)
    assert found.idle_engines == pytest.approx(idle_engines, abs=1e-9)


def test_long_responses_want_more_lag():
    """One of eight is 16 times longer: at lag 0 every step waits for it, at lag 4 others are
    trained meanwhile."""
    made = stages([1] * 7 + [16], update=1.0, publish=0.0)
    seconds = [simulate(Schedule(8, lag), made, 1).step_s for lag in (0, 1, 2, 4)]
    assert seconds[0] == 17 and seconds == sorted(seconds, reverse=True)
    assert seconds[0] / seconds[3] > 3


def test_a_step_is_never_shorter_than_the_update_or_the_engines_work():
    made = stages([2, 9, 4, 7], token=0, sequence=0.25)
    for lag in range(4):
        found = simulate(Schedule(4, lag), made, 1)
        assert found.step_s >= max(4, 22 * 0.25) - 1e-9
