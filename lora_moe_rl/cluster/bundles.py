"""The resources of a run that belong together on one node, and whether nodes hold them.

Knows no Ray: a launcher asks before there is a cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.sharing import gpus_together
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.upstream.versions import vllm_on_cpu

Bundle = dict[str, float]
NO_ENGINE = (
    "vLLM is its CUDA build, whose engines do not start without a GPU: take an environment with "
    "its CPU build (`make setup` without GPU=1), or a cluster that has GPUs"
)


def wanted(config: RunConfig, gpus: bool) -> list[Bundle]:
    """The bundles to ask Ray for: one for each tensor-parallel group of the trainer, then one for
    each engine on each of its nodes; where these stand on the same GPUs, one for both together.
    `gpus`: whether there are any."""
    trainer = config.trainer
    if size := shared_size(config, gpus):
        return [_bundle(size + size // config.rollout.ranks, size)] * (trainer.world_size // size)
    group = _bundle(trainer.tp, gpus_of_rank(config, gpus) * trainer.tp)
    engine = of_engine(config, gpus)
    engines = [engine] * (firm_engines(config) * config.rollout.nodes)
    return [group] * (trainer.world_size // trainer.tp) + engines


def lacks_gpu(config: RunConfig, gpus: bool) -> bool:
    """Whether the run's engines want a GPU, and there is none."""
    return not gpus and not config.offline and not vllm_on_cpu()


def firm_engines(config: RunConfig) -> int:
    """Engines without which the run does not go on; the place of each other is its own."""
    return 0 if config.offline else config.rollout.firm_engines


def of_engine(config: RunConfig, gpus: bool) -> Bundle:
    """What an engine wants of each of its nodes."""
    return _bundle(1, gpus_of_engine(config, gpus))


def shared_size(config: RunConfig, gpus: bool) -> int:
    """GPUs of one bundle of ranks and engines that take turns on them; 0 where they do not. Raises
    ConfigError when ranks and engines cannot be on the same ones."""
    if not config.placement.colocated or not gpus:
        return 0
    if not _trains_on_gpu(config, gpus):
        raise ConfigError(
            f"placement.mode=colocated has trainer and engines take turns on the same devices, and "
            f"with trainer.device={config.trainer.device} the trainer is not on the GPUs that "
            "engines take: use trainer.device=cuda, or placement.mode=split"
        )
    return gpus_together(config)


def same_gpus(config: RunConfig, gpus: bool) -> bool:
    """Whether ranks and engines may stand on the same GPUs: they take turns there, or each has a
    fraction of one."""
    if shared_size(config, gpus):
        return True
    return 0 < gpus_of_rank(config, gpus) < 1 and 0 < gpus_of_engine(config, gpus) < 1


def engines_share(config: RunConfig, gpus: bool) -> bool:
    """Whether several engines may stand on one GPU, of which each has a fraction."""
    return config.num_engines > 1 and 0 < gpus_of_engine(config, gpus) < 1


def gpus_of_rank(config: RunConfig, gpus: bool) -> float:
    return config.trainer.gpus_per_rank if _trains_on_gpu(config, gpus) else 0


def gpus_of_engine(config: RunConfig, gpus: bool) -> float:
    """How many GPUs an engine wants of each of its nodes."""
    rollout = config.rollout
    if shared_size(config, gpus):
        return 0  # those of the ranks beside it
    if rollout.gpus_per_engine is None:
        return rollout.ranks // rollout.nodes if gpus else 0
    return rollout.gpus_per_engine / rollout.nodes


def _trains_on_gpu(config: RunConfig, gpus: bool) -> bool:
    return gpus if config.trainer.device == "auto" else config.trainer.device == "cuda"


def check_capacity(bundles: Sequence[Bundle], nodes: dict[str, dict[str, float]]) -> None:
    """Raises ConfigError when the nodes, empty, could not hold the bundles. The largest bundles
    choose first, each the fullest node that holds it."""
    free = {name: dict(resources) for name, resources in nodes.items()}
    for bundle in sorted(bundles, key=lambda b: (b.get("GPU", 0), b["CPU"]), reverse=True):
        holders = [
            resources
            for resources in free.values()
            if all(resources.get(kind, 0) >= amount for kind, amount in bundle.items())
        ]
        if not holders:
            _require_gpus(bundle, nodes)
            found = "; ".join(f"{name}: {_amounts(resources)}" for name, resources in nodes.items())
            raise ConfigError(
                f"the run wants {text(bundles)}, each on one node (trainer.tp ranks, or one "
                f"engine), and the cluster has {found}: lower trainer.world_size, trainer.tp, "
                "rollout.engines or rollout.tp, raise rollout.nodes with rollout.dp, or add nodes; "
                "RAY_ADDRESS says which cluster"
            )
        fullest = min(holders, key=lambda resources: (resources.get("GPU", 0), resources["CPU"]))
        for kind, amount in bundle.items():
            fullest[kind] -= amount


def _require_gpus(bundle: Bundle, nodes: dict[str, dict[str, float]]) -> None:
    if bundle.get("GPU") and not any(resources.get("GPU") for resources in nodes.values()):
        raise ConfigError(
            f"the run wants GPUs, and the cluster has none ({', '.join(nodes)}): "
            "trainer.device=cpu trains without, trainer.device=auto takes what there is; "
            "RAY_ADDRESS says which cluster"
        )


def _bundle(cpus: float, gpus: float) -> Bundle:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def text(bundles: Sequence[Bundle]) -> str:
    counts = Counter(_amounts(bundle) for bundle in bundles)
    return " and ".join(f"{count} x ({amounts})" for amounts, count in counts.items())


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{resources.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
