"""A run as a launcher sees it: so many nodes, and a command on the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_moe_rl.cluster.bundles import Bundle, check_capacity, text, wanted
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError

RAY_PORT = 6379

MOST_NOTICE_S = 65_535  # of sbatch's --signal


@dataclass(frozen=True)
class Job:
    """`config_file` and `run_dir` are absolute, on a file system that all nodes share; `folder` is
    where the launcher's files go, there too."""

    name: str
    config_file: Path
    run_dir: Path
    folder: Path
    nodes: int
    gpus: int  # of each node
    environment: Path  # of Python, as on every node
    image: str = "lora-moe-rl:gpu"
    hosts: Sequence[str] = field(default_factory=tuple)
    notice_s: int = 1800  # so long before the end of its time Slurm tells the run
    hub_home: Path | None = None  # HF_HOME, where nodes find a model of the hub

    @property
    def node_check(self) -> str:
        """The command that looks at the node on which it runs."""
        where = f"--gpus {self.gpus} --seen {self.folder}/nodes"
        return f"python -m lora_moe_rl.launch.node {self.config_file} {where}"

    @property
    def train(self) -> str:
        """A bash command line that begins the run, or goes on with it once it has steps."""
        return f"lora-moe-rl train {self.config_file} --resume=auto"


def nodes_needed(config: RunConfig, gpus: int) -> int:
    """The fewest nodes of so many GPUs that hold the run. Raises ConfigError when one of its
    bundles is larger than a node."""
    bundles = wanted(config, gpus > 0)
    for bundle in bundles:
        if bundle.get("GPU", 0) > gpus:
            raise ConfigError(
                f"the run wants {text(bundles)}, each on one node, and a node has --gpus-per-node "
                f"{gpus}: lower trainer.tp or rollout.tp, or take larger nodes"
            )
    most = len(bundles)
    return next(n for n in range(1, most + 1) if _hold(bundles, n, gpus))


def _hold(bundles: Sequence[Bundle], nodes: int, gpus: int) -> bool:
    cpus = sum(bundle["CPU"] for bundle in bundles)  # GPUs are what is scarce
    there: dict[str, dict[str, float]] = {str(i): {"CPU": cpus, "GPU": gpus} for i in range(nodes)}
    try:
        check_capacity(bundles, there)
    except ConfigError:
        return False
    return True
