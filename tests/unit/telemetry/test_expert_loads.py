"""Counts of chosen experts as metrics."""

import numpy as np
import pytest

from lora_moe_rl.telemetry.expert_loads import metrics
from lora_moe_rl.telemetry.metric_table import find


def test_equal_loads_have_an_entropy_of_1_and_no_expert_that_is_busier_or_idle():
    found = metrics((1, 7), np.full((2, 4), 30))
    assert found == {
        "experts/busiest": 1.0,
        "experts/entropy": pytest.approx(1.0),
        "experts/idle": 0.0,
        "experts/busiest/layer_01": 1.0,
        "experts/busiest/layer_07": 1.0,
    }
    assert all(find(name) for name in found)


def test_the_busiest_is_that_of_the_worst_layer_and_entropy_the_mean_over_layers():
    found = metrics((0, 3), np.array([[10, 10, 20, 0], [100, 0, 0, 0]]))
    assert found["experts/busiest/layer_00"] == 2.0
    assert found["experts/busiest/layer_03"] == found["experts/busiest"] == 4.0
    # Half and two quarters are 1.5 bits of 2; always the same is none.
    assert found["experts/entropy"] == pytest.approx((1.5 / 2 + 0) / 2)
    assert found["experts/idle"] == 4 / 8


def test_a_step_without_a_forward_says_nothing():
    assert metrics((0,), np.zeros((1, 4), np.int64)) == {}
    assert metrics((), np.zeros((0, 0), np.int64)) == {}
