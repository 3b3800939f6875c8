"""Whether the learning rate's warm-up ends within the run."""

from __future__ import annotations

from lora_moe_rl import algorithms
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError


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
