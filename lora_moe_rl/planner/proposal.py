"""A layout that a search proposes, and the keys of a config that make one."""

from __future__ import annotations

from dataclasses import dataclass

from lora_moe_rl.config import RolloutConfig, RunConfig
from lora_moe_rl.planner.compute import Seconds
from lora_moe_rl.planner.plan import gpus_of
from lora_moe_rl.planner.rollout import EngineRank
from lora_moe_rl.planner.trainer import RankClass

LAYOUT_KEYS = ("world_size", "tp", "pp", "ep", "etp", "vpp")
# All keys that a search sets, by section.
SEARCHED = {
    "trainer": (*LAYOUT_KEYS, "recompute", "gpus_per_rank"),
    "rollout": (
        "engines",
        "tp",
        "dp",
        "nodes",
        "ep",
        "fully_sharded",
        "gpus_per_engine",
        "gpu_memory_utilization",
    ),
}
# Of these, what is part of a whole layout alone: it cannot be given to a search.
NOT_KEPT = {
    "trainer": ("etp", "vpp", "gpus_per_rank"),
    "rollout": ("dp", "nodes", "gpus_per_engine"),
}


@dataclass(frozen=True)
class Proposal:
    """A layout that divides and fits. `seconds` without the refit, which hardly differs."""

    config: RunConfig
    heaviest: RankClass
    engine: EngineRank
    seconds: Seconds
    shared: bool

    @property
    def gpus(self) -> int:
        """How many GPUs are used."""
        mine, theirs, shared = gpus_of(self.config)
        return mine if shared else mine + theirs

    @property
    def settings(self) -> dict[str, object]:
        """The keys of the config that make this layout."""
        trainer, rollout = self.config.trainer, self.config.rollout
        found: dict[str, object] = {
            f"trainer.{key}": getattr(trainer, key)
            for key in ("world_size", "tp", "pp", "ep", "recompute")
        }
        found |= {"rollout.engines": rollout.engines, **engine_settings(rollout)}
        if self.shared:
            found |= {
                "trainer.gpus_per_rank": trainer.gpus_per_rank,
                "rollout.gpus_per_engine": rollout.gpus_per_engine,
            }
        return found | {"rollout.gpu_memory_utilization": rollout.gpu_memory_utilization}


def engine_settings(rollout: RolloutConfig) -> dict[str, object]:
    """The keys that lay out one engine."""
    found: dict[str, object] = {"rollout.tp": rollout.tp}
    if rollout.dp > 1:
        found |= {"rollout.dp": rollout.dp, "rollout.nodes": rollout.nodes}
    cut = {"ep": rollout.ep, "fully_sharded": rollout.fully_sharded}
    return found | {f"rollout.{key}": True for key, value in cut.items() if value}
