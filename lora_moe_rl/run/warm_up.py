"""Whether the learning rate's warm-up ends within the run, and its schedule not before it."""

from __future__ import annotations

from collections.abc import Mapping

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.trainer_state import POLICY, Done


def check(config: RunConfig) -> str:
    """A warning of a warm-up that goes on after the run's last step, '' for another. Raises
    ConfigError when it leaves no step to a schedule that falls, which then has no effect."""
    trainer, steps = config.trainer, algorithms.optimizer_steps(config)
    warmed = f"trainer.warmup_steps={trainer.warmup_steps} of the run's {steps} optimizer steps"
    out = f"lower trainer.warmup_steps, or raise trainer.steps={trainer.steps}"
    # The first step after the warm-up is still at the full rate.
    if trainer.lr_schedule != "constant" and trainer.warmup_steps >= steps - 1:
        raise ConfigError(
            f"trainer.lr_schedule={trainer.lr_schedule} has no effect: {warmed} leave it none; "
            f"{out}"
        )
    if trainer.warmup_steps > steps:
        return f"{warmed}: the learning rate does not rise to trainer.lr={trainer.lr:g}; {out}"
    return ""


def at_its_end(config: RunConfig, meta: Mapping[str, int]) -> str:
    """A warning of a run that goes on when its schedule has nothing left for it, '' for another.
    `meta`: the trainer's, of the checkpoint."""
    trainer, steps = config.trainer, algorithms.optimizer_steps(config)
    done = Done.of(meta, POLICY, config.algorithm.updates_per_step).scheduled
    if trainer.lr_schedule == "constant" or done < steps:
        return ""
    return (
        f"trainer.lr_schedule={trainer.lr_schedule} is at its end, {done} of {steps} optimizer "
        f"steps: the run goes on at trainer.min_lr={trainer.min_lr:g}; raise trainer.steps="
        f"{trainer.steps}, or set trainer.lr_schedule=constant"
    )
