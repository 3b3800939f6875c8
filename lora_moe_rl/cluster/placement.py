"""Where the actors of a run stand on the nodes of a Ray cluster.

What must not be torn apart is one bundle of a placement group, and so on one node: the trainer
ranks of one tensor-parallel group, and an engine with its workers, or of an engine with rollout.dp
ranks on rollout.nodes the part that stands on one of them. Megatron numbers ranks with tp
fastest, then the rest of a stage, pp slowest; bundles are taken node by node in that order, so that
expert-parallel ranks share nodes as far as they can and pipeline stages are what crosses them.

With placement.mode=colocated on GPUs a bundle is the larger of the two, and holds both. Ray gives
its GPUs to the ranks, and ranks and engines are told which they see: rank r of engine e is on the
GPU of trainer rank e * (ranks of an engine) + r.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from lora_moe_rl.cluster import bundles
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError

NO_HIDING = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


class Placement:
    """The nodes' resources that a run has reserved. They are free again when it ends."""

    def __init__(self, config: RunConfig, shared: Sequence[Path] = ()):
        """`shared`: what every node must see. Raises ConfigError, naming what was found, when a
        node does not, when the cluster cannot hold the run, or does not within
        rollout.start_timeout_s."""
        self.config = config
        gpus = ray.cluster_resources().get("GPU", 0) > 0
        if bundles.lacks_gpu(config, gpus):
            raise ConfigError(f"the cluster has no GPU, and {bundles.NO_ENGINE}")
        self.trainer_gpus = bundles.gpus_of_rank(config, gpus)
        self.engine_gpus = bundles.gpus_of_engine(config, gpus)
        self.shared = bundles.shared_size(config, gpus)
        self.same_gpus = bundles.same_gpus(config, gpus)
        self.engines_share = bundles.engines_share(config, gpus)
        self.firm = bundles.firm_engines(config)
        self._own: dict[int, PlacementGroup] = {}  # of engines that may join
        self._bundle_of_engine = bundles.of_engine(config, gpus)
        wanted = bundles.wanted(config, gpus)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        names = [f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})" for node in nodes]
        bundles.check_capacity(
            wanted, dict(zip(names, [node["Resources"] for node in nodes], strict=True))
        )
        self.group = placement_group(wanted, strategy="PACK")
        try:
            ray.get(self.group.ready(), timeout=config.rollout.start_timeout_s)
        except GetTimeoutError as error:
            raise ConfigError(
                f"the cluster is large enough for the run, but {bundles.text(wanted)} did not "
                f"become free within rollout.start_timeout_s={config.rollout.start_timeout_s:g} s; "
                "other jobs hold them (`ray status` shows which)"
            ) from error
        places = placement_group_table(self.group)["bundles_to_node_id"]
        self.ranks = self.shared or config.trainer.tp  # of a bundle
        groups = config.trainer.world_size // self.ranks
        self.trainer_bundles = node_by_node([places[i] for i in range(groups)])
        if len(nodes) > 1:
            check_shared(shared, sorted(set(places.values())))
        self.devices = [self._devices(bundle) for bundle in range(groups) if self.shared]

    def trainer(self, rank: int) -> dict[str, Any]:
        """Ray options of a trainer rank."""
        bundle = self.trainer_bundles[rank // self.ranks]
        options = self._options(self.trainer_gpus, bundle)
        return options | (self._seen(bundle, rank % self.shared, 1) if self.shared else {})

    def engine(self, index: int, node: int = 0) -> dict[str, Any]:
        """Ray options of an engine, on one of its nodes. One that is started anew gets the same
        place."""
        if self.shared:
            bundle, place = divmod(index * self.config.rollout.ranks, self.shared)
            bundle = self.trainer_bundles[bundle]
            return self._options(0, bundle) | self._seen(bundle, place, self.config.rollout.ranks)
        if index >= self.firm:
            return self._options(self.engine_gpus, node, self._place_of_its_own(index))
        bundle = len(self.trainer_bundles) + index * self.config.rollout.nodes + node
        return self._options(self.engine_gpus, bundle)

    def _place_of_its_own(self, index: int) -> PlacementGroup:
        """Which an actor waits for: it may not be there yet."""
        if index not in self._own:
            self._own[index] = placement_group([self._bundle_of_engine] * self.config.rollout.nodes)
        return self._own[index]

    def _seen(self, bundle: int, first: int, count: int) -> dict[str, Any]:
        """Which of a bundle's GPUs an actor sees. Ray would hide all from one to which it gives
        none, and show a rank any one of them."""
        devices = ",".join(self.devices[bundle][first : first + count])
        return {"runtime_env": {"env_vars": {NO_HIDING: "1", "CUDA_VISIBLE_DEVICES": devices}}}

    def _devices(self, bundle: int) -> list[str]:
        """The GPUs of a bundle, all of which Ray will give to the ranks in it."""
        look = ray.remote(_gpus).options(**self._options(self.shared, bundle))
        return sorted(ray.get(look.remote()))

    def _options(
        self, gpus: float, bundle: int, group: PlacementGroup | None = None
    ) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(group or self.group, bundle)
        return {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": strategy}


def check_shared(paths: Sequence[Path], nodes: Sequence[str]) -> None:
    """Raises ConfigError for a path that one of the nodes (Ray's ids) does not see."""
    look = ray.remote(num_cpus=0)(_look)
    refs = [
        look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
            [str(path) for path in paths]
        )
        for node in nodes
    ]
    for host, missing in ray.get(refs):
        if missing:
            raise ConfigError(
                f"{host} does not see {', '.join(missing)}: with several nodes, model.path, "
                "logging.run_dir and the files of your own algorithm, environment and tracker "
                "must lie on a file system that all of them share, under one name"
            )


def _gpus() -> list[str]:
    return [str(device) for device in ray.get_gpu_ids()]


def _look(paths: list[str]) -> tuple[str, list[str]]:
    return socket.gethostname(), [path for path in paths if not os.path.exists(path)]


def node_by_node(nodes: Sequence[str]) -> list[int]:
    """Indices of bundles, those of one node after another; `nodes`: where each of them is."""
    first = {node: i for i, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda i: (first[nodes[i]], i))
