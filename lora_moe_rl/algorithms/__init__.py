"""What turns rewards into a loss: one file an algorithm, made of the functions in `parts/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_moe_rl.config.plugins import ALGORITHMS
from lora_moe_rl.errors import ConfigError

if TYPE_CHECKING:
    from lora_moe_rl.algorithms.base import Algorithm, Pass
    from lora_moe_rl.algorithms.parts.critic import CriticSettings
    from lora_moe_rl.config import RunConfig


def make(config: RunConfig) -> Algorithm:
    """The algorithm that `algorithm.name` names. Raises ConfigError when there is none, and for a
    critic that leaves its policy no step or wants routes that are not there."""
    found = ALGORITHMS.find(config.algorithm.name)
    algorithm = found(config.algorithm, config.rollout.max_response_tokens)
    if algorithm.critic is not None:
        _check_critic(config, algorithm.critic)
    return algorithm


def _check_critic(config: RunConfig, critic: CriticSettings) -> None:
    steps, mode = config.trainer.steps, config.replay.mode
    if critic.critic_routes == "rollout" and mode != "r3":
        raise ConfigError(
            f"algorithm.critic_routes=rollout wants the rollout's routes, and replay.mode={mode} "
            "does not replay them; set replay.mode=r3, or leave the critic's routes free"
        )
    if critic.critic_warmup >= steps:
        raise ConfigError(
            f"algorithm.critic_warmup={critic.critic_warmup} leaves the policy none of "
            f"trainer.steps={steps}; lower it, or raise trainer.steps"
        )


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
