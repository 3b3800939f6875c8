"""Engines that share a GPU start one after another, those on GPUs of their own together."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import obedient_engine
import pytest
from engine_group import fate

from lora_moe_rl.cluster import engine_actor
from lora_moe_rl.cluster.start_order import waves
from lora_moe_rl.errors import EngineDied

HELPERS = Path(__file__).parents[2] / "helpers"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([{0}, {0}, {1}, {1}], [[0, 2], [1, 3]]),
        ([{0}, {1}, {2}], [[0, 1, 2]]),
        ([{0}, {0}, {0}], [[0], [1], [2]]),
        ([{0, 1}, {1, 2}, {2, 3}, {0}], [[0, 2], [1, 3]]),  # on several nodes
        ([set(), set()], [[0, 1]]),
    ],
)
def test_no_two_of_a_wave_share_a_gpu(gpus, expected):
    assert waves(gpus) == expected


# Ray hands GPUs out by number, whether or not there are any.
ON_GPUS = """
import json, sys, time
from types import SimpleNamespace
import obedient_engine, ray
from lora_moe_rl.cluster import engine_actor, replicas
from lora_moe_rl.cluster.placement import Placement
from lora_moe_rl.cluster.ray_start import local_ray
from lora_moe_rl.config import RunConfig

class Engine(obedient_engine.Engine):
    async def start(self):
        begun = time.time()
        time.sleep(2.0)
        return ray.get_gpu_ids(), begun, time.time()

ray.cloudpickle.register_pickle_by_value(obedient_engine)
local_ray(5, num_gpus=2)
rollout = {"engines": 4, "gpus_per_engine": 0.5}
config = RunConfig(model={"path": "x"}, trainer={"device": "cpu"}, rollout=rollout)
engine_actor.RolloutEngine = Engine
run_dir = SimpleNamespace(log_path=lambda name: f"/nowhere/{name}", tail=lambda name: "")
spec = SimpleNamespace(shape=SimpleNamespace(num_layers=2, moe_layers=(0, 1)))
engines = replicas.Replicas(config, spec, "", run_dir, Placement(config))
engines.start_async()
assert list(engines.starting) == [f"engine-{i}" for i in range(4)]
first = engines.wait_started()
assert engines.wait_started() == first
print(json.dumps(first))
"""


@pytest.mark.seconds
def test_fractions_of_gpus():
    command = [sys.executable, "-c", ON_GPUS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    started = json.loads(done.stdout.splitlines()[-1])
    for gpu in (0, 1):
        (_, _, ended), (_, begun, _) = sorted(
            (one for one in started if one[0] == [gpu]), key=lambda one: one[1]
        )
        assert begun >= ended
    by_begin = sorted(started, key=lambda one: one[1])
    assert by_begin[1][1] < by_begin[0][2]  # the first of each GPU, together


@pytest.mark.seconds
def test_engines_that_die_together_are_started_anew_in_turn(start, tmp_path, monkeypatch):
    engines = start()
    engines.placement.engines_share = True

    class Slow(obedient_engine.Engine):
        async def start(self):
            begun = time.time()
            time.sleep(3.0)
            (self.folder / f"started-{self.index}").write_text(f"{begun} {time.time()}")
            return await super().start()

    monkeypatch.setattr(engine_actor, "RolloutEngine", Slow)
    for index in range(2):
        fate(tmp_path, index, "sample", "exit")

    async def lost():
        asked = (engines.policy(3, seed=seed).sample([seed], n=1) for seed in range(2))
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, EngineDied) for one in ended)
        await engines.all_back()

    asyncio.run(lost())
    assert engines.restarts == 2
    texts = [(tmp_path / f"started-{index}").read_text() for index in range(2)]
    (_, ended), (begun, _) = sorted(tuple(map(float, text.split())) for text in texts)
    assert begun >= ended
