"""In which order a run's ranks take the nodes that it was given."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lora_moe_rl.cluster.placement import node_by_node


def test_ranks_that_follow_each_other_share_a_node():
    assert node_by_node(["x", "y", "x", "z", "y", "x"]) == [0, 2, 5, 1, 4, 3]
    assert node_by_node(["x"] * 3) == [0, 1, 2]


TAKING_TURNS = """
import os, json, ray, sys
from lora_moe_rl.cluster.ray_start import local_ray
from lora_moe_rl.cluster.placement import Placement
from lora_moe_rl.config import RunConfig

class Where:
    def gpus(self):
        return os.environ["CUDA_VISIBLE_DEVICES"].split(","), ray.get_gpu_ids()

local_ray(10, num_gpus=8)
config = RunConfig(
    model={"path": "x"}, trainer={"world_size": 8, "tp": 2, "device": "cuda"},
    rollout={"engines": 2} | json.loads(sys.argv[1]), placement={"mode": "colocated"},
)
place, actor = Placement(config), ray.remote(Where)
ranks = [actor.options(**place.trainer(rank)).remote() for rank in range(8)]
engines = [actor.options(**place.engine(index)).remote() for index in range(2)]
print(json.dumps([ray.get([one.gpus.remote() for one in some]) for some in (ranks, engines)]))
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    "ranks", [{"tp": 4}, pytest.param({"dp": 4, "ep": True}, marks=pytest.mark.slow)]
)
def test_engines_see_the_gpus_of_the_ranks_with_which_they_take_turns(ranks):
    """Ray hands GPUs out by number, whether or not there are any."""
    command = [sys.executable, "-c", TAKING_TURNS, json.dumps(ranks)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    ranks, engines = json.loads(done.stdout.splitlines()[-1])
    of_ranks = [seen for (seen,), _ in ranks]
    assert sorted(of_ranks) == [str(number) for number in range(8)]
    # In one order: on a GPU are the ranks of trainer and engine that base/parts.py counts with.
    assert [seen for seen, _ in engines] == [of_ranks[:4], of_ranks[4:]]
    assert [len(given) for _, given in ranks] == [1] * 8
    assert [given for _, given in engines] == [[], []]
