"""What belongs together on one node, and which nodes hold it, from resources alone."""

from __future__ import annotations

import pytest

from lora_moe_rl.cluster import bundles
from lora_moe_rl.cluster.bundles import check_capacity, lacks_gpu, same_gpus, wanted
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError

GROUP, ENGINE = {"CPU": 8, "GPU": 8}, {"CPU": 1, "GPU": 4}


def node(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus, "memory": 1e9}


@pytest.mark.parametrize(
    "nodes",
    [
        {"a": node(64, 8), "b": node(64, 8), "c": node(64, 8)},
        {"a": node(64, 4), "b": node(64, 4), "c": node(64, 8), "d": node(64, 8)},
        {"a": node(64, 24)},
    ],
)
def test_a_cluster_that_holds_it(nodes):
    check_capacity([ENGINE, GROUP, GROUP, ENGINE], nodes)
    assert nodes["a"]["GPU"] in (4, 8, 24)  # what was found stays as it was


@pytest.mark.parametrize(
    "nodes",
    [
        {"a": node(64, 8), "b": node(64, 8)},  # too few
        {"a": node(64, 4), "b": node(64, 4), "c": node(64, 4), "d": node(64, 12)},  # torn apart
        {"a": node(7, 8), "b": node(7, 8), "c": node(64, 8)},  # too few CPUs
        {"a": {"CPU": 64}, "b": node(64, 1)},
    ],
)
def test_one_that_does_not_is_named(nodes):
    with pytest.raises(ConfigError) as caught:
        check_capacity([GROUP, GROUP, ENGINE, ENGINE], nodes)
    message = str(caught.value)
    assert "2 x (8 CPUs, 8 GPUs) and 2 x (1 CPUs, 4 GPUs)" in message
    for name, found in nodes.items():
        assert f"{name}: {found['CPU']:g} CPUs, {found.get('GPU', 0):g} GPUs" in message
    assert "trainer.tp" in message


def test_a_cluster_without_gpus_is_named_as_such():
    with pytest.raises(ConfigError, match=r"the cluster has none \(a, b\): trainer.device=cpu"):
        check_capacity([GROUP], {"a": {"CPU": 64}, "b": node(8, 0)})


@pytest.mark.parametrize(
    ("trainer", "rollout", "placement", "together"),
    [
        ({}, {}, {}, False),
        ({"gpus_per_rank": 0.5}, {"gpus_per_engine": 0.5}, {}, True),
        ({"gpus_per_rank": 0.5}, {}, {}, False),
        ({}, {"gpus_per_engine": 0.5}, {}, False),
        ({}, {}, {"mode": "colocated"}, True),
        ({"device": "cpu"}, {"gpus_per_engine": 0.5}, {}, False),
    ],
)
def test_ranks_and_engines_may_stand_on_the_same_gpus(trainer, rollout, placement, together):
    config = RunConfig(model={"path": "x"}, trainer=trainer, rollout=rollout, placement=placement)
    assert same_gpus(config, gpus=True) is together
    assert not same_gpus(config, gpus=False)


def test_engines_of_a_gpu_want_one(monkeypatch):
    rollouts, answers = RunConfig(), RunConfig(algorithm={"name": "sft"})
    assert not lacks_gpu(rollouts, gpus=False)
    monkeypatch.setattr(bundles, "vllm_on_cpu", lambda: False)
    assert lacks_gpu(rollouts, gpus=False) and not lacks_gpu(rollouts, gpus=True)
    assert not lacks_gpu(answers, gpus=False)  # it has no engines


def test_what_a_run_wants_follows_its_layout():
    config = RunConfig(
        model={"path": "x"},
        trainer={"world_size": 8, "tp": 4, "ep": 2},
        rollout={"engines": 3, "tp": 2},
    )
    group, engine = {"CPU": 4, "GPU": 4}, {"CPU": 1, "GPU": 2}
    assert wanted(config, gpus=True) == [group] * 2 + [engine] * 3
    assert wanted(config, gpus=False) == [{"CPU": 4}] * 2 + [{"CPU": 1}] * 3
    spread = config.rollout.model_copy(update={"tp": 1, "dp": 16, "nodes": 2, "ep": True})
    there = config.model_copy(update={"rollout": spread})
    assert wanted(there, gpus=True) == [group] * 2 + [{"CPU": 1, "GPU": 8}] * 6
    fewer = config.rollout.model_copy(update={"least_engines": 1})
    config = config.model_copy(update={"rollout": fewer})
    assert wanted(config, gpus=True) == [group] * 2 + [engine]  # the others have their own


def colocated(world_size: int, tp: int, engines: int, engine_tp: int, **trainer) -> RunConfig:
    return RunConfig(
        model={"path": "x"},
        trainer={"world_size": world_size, "tp": tp, **trainer},
        rollout={"engines": engines, "tp": engine_tp},
        placement={"mode": "colocated"},
    )


@pytest.mark.parametrize(
    ("layout", "bundles"),
    [
        ((16, 2, 2, 8), [{"CPU": 9, "GPU": 8}] * 2),  # four groups of ranks in an engine
        ((16, 8, 8, 2), [{"CPU": 12, "GPU": 8}] * 2),  # four engines on a group of ranks
        ((2, 1, 2, 1), [{"CPU": 2, "GPU": 1}] * 2),
    ],
)
def test_what_takes_turns_wants_each_gpu_once(layout, bundles):
    config = colocated(*layout)
    assert wanted(config, gpus=True) == bundles
    apart = config.model_copy(update={"placement": RunConfig().placement})
    assert wanted(config, gpus=False) == wanted(apart, gpus=False)
    assert sum(one["GPU"] for one in wanted(apart, gpus=True)) == 2 * layout[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (colocated(8, 1, 1, 4), "trainer.world_size=8 is not rollout.engines=1 [*] rollout.tp=4"),
        (colocated(6, 2, 2, 3), "trainer.tp=2 and rollout.tp=3"),
        (colocated(2, 1, 2, 1, device="cpu"), "trainer.device=cpu"),
    ],
)
def test_what_cannot_be_on_the_same_gpus_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        wanted(config, gpus=True)
