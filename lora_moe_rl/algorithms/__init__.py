"""What turns rewards into a loss: one file an algorithm, made of the functions in `parts/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_moe_rl.config.plugins import ALGORITHMS

if TYPE_CHECKING:
    from lora_moe_rl.algorithms.base import Algorithm, Pass
    from lora_moe_rl.config import RunConfig


def make(config: RunConfig) -> Algorithm:
    """The algorithm that `algorithm.name` names. Raises ConfigError when there is none."""
    algorithm = ALGORITHMS.find(config.algorithm.name)
    return algorithm(config.algorithm, config.rollout.max_response_tokens)


def passes(config: RunConfig) -> frozenset[Pass]:
    """The forwards that are made before the update: what the algorithm wants; and `old` whenever
    the ratio is not 1 by construction, tokens may be rejected, a mean over the step is wanted, or
    routes are to be recorded (replay.mode=r2)."""
    algorithm = make(config)
    wanted = set(algorithm.passes)
    asked = algorithm.rejects or algorithm.averages
    if asked or not config.algorithm.on_policy or config.replay.mode == "r2":
        wanted.add("old")
    return frozenset(wanted)
