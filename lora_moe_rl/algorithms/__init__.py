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
    """The algorithm that `algorithm.name` names. Raises ConfigError when there is none, for a
    critic that has nothing to learn, leaves its policy no step, wants routes that are not there or
    has a learning rate that its schedule would raise, and for a teacher that would score another
    distribution than the one that is sampled from."""
    found = ALGORITHMS.find(config.algorithm.name)
    algorithm = found(config.algorithm, config.max_response_tokens)
    if algorithm.critic is not None:
        _check_returns(algorithm)
        _check_critic(config, algorithm.critic)
    if algorithm.teacher is not None and config.rollout.temperature != 1:
        raise ConfigError(
            f"rollout.temperature={config.rollout.temperature:g}: a teacher gives logprobs at "
            "temperature 1, and those of the policy are of what it samples from, so that their "
            "difference would be no KL; set rollout.temperature=1"
        )
    return algorithm


def _check_returns(algorithm: Algorithm) -> None:
    """Raises ConfigError for a critic without what it is to learn, which an algorithm of one's own
    may have forgotten."""
    from lora_moe_rl.algorithms.base import Algorithm

    kind = type(algorithm)
    missing = [
        f"writes no `{name}`"
        for name in ("returns", "revised")
        if getattr(kind, name) is getattr(Algorithm, name)
    ]
    if "values" not in algorithm.passes:
        missing.append("does not name `values` among its passes")
    if missing:
        raise ConfigError(
            f"algorithm={algorithm.settings.name} has a critic, but {kind.__name__} "
            f"{' and '.join(missing)}: a critic learns the returns of the values that are asked "
            "for before the update (docs/adding/algorithm.md)"
        )


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
    least = config.trainer.min_lr
    if critic.critic_lr is not None and critic.critic_lr < least:
        raise ConfigError(
            f"algorithm.critic_lr={critic.critic_lr:g} is below trainer.min_lr={least:g}, to which "
            f"trainer.lr_schedule={config.trainer.lr_schedule} would raise it; lower trainer.min_lr"
            ", or raise critic_lr"
        )


def optimizer_steps(config: RunConfig) -> int:
    """Of the policy, in the whole run: without those in which a critic learns alone."""
    critic = make(config).critic
    alone = 0 if critic is None else critic.critic_warmup
    return (config.trainer.steps - alone) * config.algorithm.updates_per_step


def passes(config: RunConfig) -> frozenset[Pass]:
    """The forwards that are made before the update: what the algorithm wants; and `old` whenever
    tokens may be rejected or are selected, a mean over the step is wanted, or, of rollouts, the
    ratio is not 1 by construction or routes are to be recorded (replay.mode=r2)."""
    algorithm = make(config)
    wanted = set(algorithm.passes)
    asked = algorithm.rejects or algorithm.selects or algorithm.averages
    if not config.offline:
        asked = asked or not config.algorithm.on_policy or config.replay.mode == "r2"
    if asked:
        wanted.add("old")
    return frozenset(wanted)
