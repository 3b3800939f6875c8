"""What the memory of a node's host holds: by hand, and what is said when it is too much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner import command, host
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.hardware import GIB, Hardware
from lora_moe_rl.planner.host import CUDA_BYTES, PROCESS_BYTES, RAY_BYTES, WORKER_BYTES
from lora_moe_rl.planner.plan import Assumed, RunPlan, make

LENGTHS = Lengths(100, 300)
RECIPES = Path(__file__).parents[3] / "recipes"


def config_of(**sections: dict) -> RunConfig:
    """Two nodes of 8: a trainer of 8 ranks in 2 stages, and 2 engines of 4."""
    trainer = {"world_size": 8, "tp": 2, "pp": 2, "ep": 4, "recompute": "full", "device": "cuda"}
    return RunConfig.model_validate(
        {
            "model": {"max_length": 4096} | sections.get("model", {}),
            "adapter": {"rank": 16},
            "trainer": trainer | sections.get("trainer", {}),
            "rollout": {"engines": 2, "tp": 4, "ep": True} | sections.get("rollout", {}),
            "algorithm": {"prompts_per_step": 10, "group_size": 4},
            **{key: sections[key] for key in ("placement", "schedule", "refit") if key in sections},
        }
    )


def plan(config: RunConfig, gpus: int = 16, **hardware: float) -> RunPlan:
    assumed = Assumed(Hardware(gpus, **hardware), "bf16", "bf16", LENGTHS)
    return make(find("qwen3-30b-a3b"), config, assumed)


def test_the_run_trainer_ranks_and_engines_are_counted_where_they_stand():
    head, engines = plan(config_of()).hosts
    assert (head.name, head.nodes) == ("run, 8 trainer ranks", 1)
    assert (engines.name, engines.nodes) == ("8 engine ranks", 1)
    ranks = 8 * (PROCESS_BYTES + CUDA_BYTES) + RAY_BYTES
    assert head.memory["processes"] == ranks + PROCESS_BYTES + 2 * WORKER_BYTES
    assert engines.memory["processes"] == ranks + 2 * PROCESS_BYTES  # vLLM's fronts
    assert engines.memory["samples"] == engines.memory["refit"] == 0
    small = plan(config_of(trainer={"world_size": 2, "tp": 1, "pp": 1, "ep": 2},
                           rollout={"engines": 1, "tp": 2})).hosts  # fmt: skip
    assert [node.name for node in small] == ["run, 2 trainer, 2 engine ranks"]
    turns = plan(config_of(placement={"mode": "colocated"}), gpus=8).hosts
    assert [node.name for node in turns] == ["run, 8 trainer, 8 engine ranks"]


def test_nodes_that_are_alike_are_one_row():
    config = config_of(rollout={"engines": 6, "tp": 4})
    found = {node.name: node.nodes for node in plan(config, gpus=32).hosts}
    assert found == {"run, 8 trainer ranks": 1, "8 engine ranks": 3}


def test_what_an_engine_has_on_a_node_stands_together():
    """Four GPUs are left beside the trainer, and each engine has eight, or four."""
    for tp, last in ((8, "8 engine ranks"), (4, "4 engine ranks")):
        trainer = {"world_size": 4, "tp": 2, "pp": 2, "ep": 2}
        rollout = {"engines": 2, "tp": tp}
        found = [node.name for node in plan(config_of(trainer=trainer, rollout=rollout), 24).hosts]
        first = "run, 4 trainer ranks" if tp == 8 else "run, 4 trainer, 4 engine ranks"
        assert found == [first, last]


def test_samples_routes_and_the_batch_by_hand():
    """40 samples of 100 and 300 tokens; with lag 1 twice as many are under way."""
    lag = {"schedule": {"lag": 1}, "refit": {"slots": 3}}
    (head, engines), (ahead, behind) = plan(config_of()).hosts, plan(config_of(**lag)).hosts
    sample = 2400 + 13 * 100 + (13 + 4) * 300
    groups, signals = 40 * sample + 10 * 36 * 100, 40 * 8 * 300
    assert head.memory["samples"] == groups + signals
    assert ahead.memory["samples"] == 2 * groups + signals
    routes, batch = 336 * 40 * 400, 40 * (4 * 400 + 17 * 300)
    assert engines.memory["object store"] == routes
    assert behind.memory["object store"] == 2 * routes
    assert head.memory["object store"] == ahead.memory["object store"] == routes + batch


def test_copies_of_the_trainers_state_count_where_they_are_held():
    """Two for a moment, of 12 bytes a weight of the whole adapter."""
    held, none = (
        plan(config_of(trainer={"max_copy_gib": size})).hosts[0].memory["object store"]
        for size in (100.0, 0.0)
    )
    assert held - none == 2 * 12 * plan(config_of()).spec.num_parameters


def test_what_waits_for_the_gpus_is_in_the_hosts_memory():
    offloaded = plan(config_of(trainer={"offload": "optimizer"}))
    most = max(one.host for one in offloaded.classes)
    assert most > 0 and offloaded.hosts[0].memory["tensors"] == 8 * most
    assert plan(config_of()).hosts[0].memory["tensors"] == 0
    asleep = plan(config_of(placement={"mode": "colocated", "gives_back": "weights"}), gpus=8)
    engine = asleep.engine
    assert engine is not None
    assert asleep.hosts[0].memory["tensors"] == 8 * (engine.weights + engine.slots)


def test_on_the_cpu_a_base_that_is_held_once_is_counted_once():
    cpu = {"device": "cpu", "world_size": 2, "tp": 1, "pp": 1, "ep": 2}
    layout = {"trainer": cpu, "rollout": {"engines": 1, "tp": 2, "ep": True}}
    own, shared = (plan(config_of(model={"held_once": held}, **layout)) for held in ("off", "on"))
    (each,), (once,) = own.hosts, shared.hosts
    parts = {part.part: part.trainer["bf16"] for part in shared.held if not part.why}
    dense, experts = sum(parts.values()) - parts["experts"], parts["experts"]
    assert dense > 0 and each.memory["held base"] == 0
    assert once.memory["held base"] == dense + 2 * experts  # each rank has half of them
    # Both ranks gave up their parts, and the engine all of it for the file.
    assert each.total - once.total == pytest.approx(2 * (dense + experts), abs=8)


def test_more_than_a_node_has_is_a_warning_with_what_it_is_and_a_way_out():
    config = config_of(trainer={"offload": "optimizer"})
    fine, tight = plan(config), plan(config, host_memory=20)
    assert fine.warnings == [] and fine.problems == tight.problems == []
    of_run, of_engines = tight.warnings
    total = tight.hosts[0].total / GIB
    assert of_run.startswith(
        f"a node of run, 8 trainer ranks holds {total:,.1f} GiB in its host's memory of 20: "
        "most of it is its processes (25."
    )
    assert "place fewer ranks on a node, or name the memory that there is" in of_run
    assert "a node of 8 engine ranks" in of_engines
    assert set(host.WAYS_OUT) == set(tight.hosts[0].memory)
    assert Hardware(8, gpus_per_node=4).node_memory == 512


def test_the_command_says_it_and_the_run_fits_all_the_same(capsys):
    recipe = str(RECIPES / "qwen3_30b_a3b.py")
    assert command.main([recipe, "--host-memory", "16"]) == 0
    shown = capsys.readouterr().out
    assert "the memory of a node's host, GiB of 16" in shown
    assert "may not fit: a node of run, " in shown and "fits" in shown
    assert command.main([recipe, "--host-memory", "16", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["warnings"]) == len(told["hosts"]) == 1
    assert told["hosts"][0]["total"] == sum(told["hosts"][0]["memory"].values()) > 16 * GIB
