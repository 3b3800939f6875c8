"""How trainer and engines that take turns are laid over the same GPUs."""

from __future__ import annotations

from lora_moe_rl.config.schema import RunConfig
from lora_moe_rl.errors import ConfigError


def gpus_together(config: RunConfig) -> int:
    """The fewest GPUs that hold whole tensor-parallel groups of the trainer, and whole engines.
    Raises ConfigError when ranks and engines cannot be on the same ones."""
    trainer, rollout = config.trainer, config.rollout
    ranks = "rollout.tp" if rollout.dp == 1 else "rollout.tp * rollout.dp"
    if trainer.world_size != rollout.engines * rollout.ranks:
        raise ConfigError(
            f"placement.mode=colocated has trainer and engines take turns on the same GPUs, and "
            f"trainer.world_size={trainer.world_size} is not rollout.engines={rollout.engines} * "
            f"{ranks}={rollout.ranks}: make them equal, or use placement.mode=split"
        )
    small, size = sorted((trainer.tp, rollout.ranks))
    if size % small or trainer.world_size % size:
        raise ConfigError(
            f"placement.mode=colocated puts whole engines and whole tensor-parallel groups of the "
            f"trainer on the same GPUs, and of trainer.tp={trainer.tp} and {ranks}={rollout.ranks} "
            "neither is a multiple of the other that divides trainer.world_size="
            f"{trainer.world_size}: change one of them, or use placement.mode=split"
        )
    return size
