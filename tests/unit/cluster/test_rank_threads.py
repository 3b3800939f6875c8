"""How many threads a trainer rank on the CPU computes with."""

from __future__ import annotations

import pytest

from lora_moe_rl.cluster.trainer import rank_threads
from lora_moe_rl.config import RunConfig

CORRECTED = {"algorithm": {"correction": "tis"}, "refit": {"slots": 3}}


@pytest.mark.parametrize(
    ("settings", "cores", "threads"),
    [
        ({}, 2, 2),
        ({"trainer": {"world_size": 2, "ep": 2}}, 2, 1),
        ({"trainer": {"world_size": 2, "ep": 2}}, 1, 1),
        ({"rollout": {"cpu_threads": 4}}, 16, 16),  # they take turns
        ({"schedule": {"lag": 1}} | CORRECTED, 2, 1),
        ({"schedule": {"lag": 1}, "rollout": {"engines": 2, "cpu_threads": 3}} | CORRECTED, 16, 10),
        ({"schedule": {"lag": 1}, "rollout": {"engines": 4}} | CORRECTED, 2, 1),
    ],
)
def test_cores_are_shared_with_engines_that_compute_at_the_same_time(settings, cores, threads):
    config = RunConfig.model_validate(settings)
    assert rank_threads(config, cores, 2048) == threads
    assert rank_threads(config, cores, 512) == 1  # for which more do not help
