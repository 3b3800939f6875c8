"""What a GPU holds when trainer and engine take turns on it (placement.mode=colocated).

rollout   what stays of a trainer rank, and all that vLLM may use
update    a trainer rank with its activations, and what the engine has not given back
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.sharing import gpus_together
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.planner.hardware import GIB
from lora_moe_rl.planner.rollout import PROFILE_BYTES, EngineRank
from lora_moe_rl.planner.trainer import RankClass


@dataclass(frozen=True)
class Turn:
    """Bytes of trainer and engine on one GPU, and of both in the host's memory beside it."""

    name: str
    trainer: int
    engine: int
    host: int

    @property
    def total(self) -> int:
        return self.trainer + self.engine


def turns(config: RunConfig, classes: Sequence[RankClass], engine: EngineRank) -> list[Turn]:
    """Of the GPUs that hold most in each."""
    moments = max(c.host for c in classes)
    kept, asleep = engine.weights + engine.slots, 0
    if config.placement.gives_back == "weights":
        kept, asleep = 0, kept
    host = moments + asleep + max(c.host_in_step for c in classes)
    return [
        Turn("rollout", max(c.resident for c in classes), engine.budget, moments),
        Turn("update", max(c.total for c in classes), kept + PROFILE_BYTES, host),
    ]


def turn_problems(config: RunConfig, found: Sequence[Turn], memory: float) -> list[str]:
    """One sentence for each turn in which a GPU of `memory` GiB holds too much, and for ranks and
    engines that cannot be on the same GPUs."""
    problems = []
    try:
        gpus_together(config)
    except ConfigError as error:
        problems.append(str(error))
    for turn in found:
        if turn.total > memory * GIB:
            problems.append(
                f"in the turn of the {turn.name} a GPU of {memory:g} GiB holds a trainer rank's "
                f"{turn.trainer / GIB:.1f} GiB and an engine's {turn.engine / GIB:.1f}; "
                f"{_way_out(config, turn)}"
            )
    return problems


def _way_out(config: RunConfig, turn: Turn) -> str:
    if not config.trainer.offloads_moments:
        value = "both" if config.trainer.offloads_activations else "optimizer"
        return f"set trainer.offload={value}, or hold less of either"
    if turn.name == "rollout":
        return "lower rollout.gpu_memory_utilization, or cut the trainer over more GPUs"
    if config.placement.gives_back == "cache":
        return "set placement.gives_back=weights, or lower trainer.micro_batch_tokens"
    return "lower trainer.micro_batch_tokens, or cut the trainer over more GPUs"
