"""What turns rewards into a loss: one file an algorithm, made of the functions in `parts/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_moe_rl.config.plugins import ALGORITHMS

if TYPE_CHECKING:
    from lora_moe_rl.algorithms.base import Algorithm, Pass
    from lora_moe_rl.config import AlgorithmConfig, RunConfig


def make(settings: AlgorithmConfig) -> Algorithm:
    """The algorithm that `algorithm.name` names. Raises ConfigError when there is none."""
    return ALGORITHMS.find(settings.name)(settings)


def passes(config: RunConfig) -> frozenset[Pass]:
    """The forwards that are made before the update: what the algorithm wants; and `old` whenever
    the ratio is not 1 by construction, or routes are to be recorded (replay.mode=r2)."""
    wanted = set(make(config.algorithm).passes) - {"old"}
    if not config.algorithm.on_policy or config.replay.mode == "r2":
        wanted.add("old")
    return frozenset(wanted)
