"""The actor of one engine, with those of its ranks on further nodes if it has any."""

from __future__ import annotations

from pathlib import Path

import ray

from lora_moe_rl.adapters.spec import AdapterSpec
from lora_moe_rl.cluster.actors import Actor
from lora_moe_rl.cluster.placement import Placement
from lora_moe_rl.cluster.spread_actor import SpreadActor
from lora_moe_rl.config import RunConfig
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.rollout.engine import RolloutEngine
from lora_moe_rl.rollout.merged import MergedRolloutEngine
from lora_moe_rl.rollout.spread import RanksOfEngine


def make_engine(
    index: int,
    config: RunConfig,
    spec: AdapterSpec,
    model_dir: Path,
    run_dir: RunDir,
    placement: Placement,
    held: str | None,
) -> Actor:
    """Returns at once; the engine starts when it is told to. `held`: the folder of the base that it
    shares, if it does."""
    engine = MergedRolloutEngine if config.refit.mode == "merged" else RolloutEngine
    name = f"engine-{index}"
    parts = (config, str(model_dir), spec, index)
    options = placement.engine(index)
    handle = ray.remote(engine).options(**options).remote(*parts, _log(run_dir, name), held)
    if config.rollout.nodes == 1:
        return Actor(handle, name, run_dir)
    ranks = []
    for node in range(1, config.rollout.nodes):
        of_node = f"{name}-node-{node}"
        made = ray.remote(RanksOfEngine).options(**placement.engine(index, node))
        further = made.remote(*parts, node, _log(run_dir, of_node))
        ranks.append(Actor(further, of_node, run_dir))
    return SpreadActor(handle, name, run_dir, ranks)


def _log(run_dir: RunDir, name: str) -> str:
    return str(run_dir.log_path(name))
