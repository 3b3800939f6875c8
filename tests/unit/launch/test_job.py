"""How many nodes a run needs."""

from __future__ import annotations

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.launch.job import nodes_needed


def a_run(world_size: int, tp: int, engines: int, engine_tp: int) -> RunConfig:
    return RunConfig(
        model={"path": "x"},
        trainer={"world_size": world_size, "tp": tp, "ep": 1},
        rollout={"engines": engines, "tp": engine_tp},
    )


@pytest.mark.parametrize(
    ("config", "gpus", "nodes"),
    [
        (a_run(32, 8, 4, 8), 8, 8),  # 4 groups and 4 engines, a node each
        (a_run(8, 4, 2, 4), 8, 2),
        (a_run(8, 4, 1, 4), 8, 2),  # 12 GPUs
        (a_run(4, 4, 2, 2), 4, 2),
        (a_run(6, 3, 0 + 1, 2), 4, 3),  # three of four on two nodes, and two on a third
        (a_run(8, 2, 2, 1), 0, 1),  # on CPUs
    ],
)
def test_as_few_nodes_as_hold_it(config, gpus, nodes):
    assert nodes_needed(config, gpus) == nodes


def test_what_no_node_can_hold_is_said_with_its_size():
    with pytest.raises(ConfigError, match="8 GPUs.*each on one node.*--gpus-per-node 4.*tp"):
        nodes_needed(a_run(8, 8, 1, 1), 4)
