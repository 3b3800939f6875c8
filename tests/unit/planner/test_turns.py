"""Trainer and engines that take turns on the same GPUs, and moments on the host: by hand, and what
is proposed."""

from __future__ import annotations

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.changes import reasons
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.hardware import GIB, RUNTIME_BYTES, Hardware
from lora_moe_rl.planner.plan import Assumed, RunPlan, make
from lora_moe_rl.planner.rollout import PROFILE_BYTES
from lora_moe_rl.planner.search import MARGIN, Search

SHARE = 0.4


def config_of(placement: dict | None = None, share: float = SHARE, **trainer) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"max_length": 4096},
            "adapter": {"rank": 16},
            "trainer": {"world_size": 8, "tp": 2, "ep": 8, "recompute": "full", **trainer},
            "rollout": {"engines": 2, "tp": 4, "ep": True, "gpu_memory_utilization": share},
            "placement": {"mode": "colocated", **(placement or {})},
        }
    )


def assumed(gpus: int = 8, memory: float = 80.0) -> Assumed:
    return Assumed(Hardware(gpus, gpu_memory=memory), "bf16", "bf16", Lengths(512, 512))


def plan(config: RunConfig, memory: float = 80.0) -> RunPlan:
    return make(find("qwen3-30b-a3b"), config, assumed(memory=memory))


@pytest.mark.parametrize("gives_back", ["cache", "weights"])
def test_what_a_gpu_holds_in_each_turn(gives_back):
    found = plan(config_of({"gives_back": gives_back}))
    (rank,), engine = found.classes, found.engine
    assert engine is not None and not found.problems and found.gpus == (8, 8, True)
    of_rollout, of_update = found.turns
    # Weights, adapters, gradients and two moments in float32; a count a tensor.
    trained = rank.trained_parameters
    stays = rank.memory["base"] + (4 + 4 + 8) * trained + RUNTIME_BYTES
    assert 0 <= of_rollout.trainer - stays < 10_000
    assert of_rollout.engine == int(SHARE * 80 * GIB) and of_rollout.host == 0
    asleep = engine.weights + engine.slots
    assert of_update.trainer == rank.total
    kept = PROFILE_BYTES + (asleep if gives_back == "cache" else 0)
    assert of_update.engine == kept and of_update.host == asleep + PROFILE_BYTES - kept


def test_moments_on_the_host_are_not_on_the_gpu():
    usual, offloaded = plan(config_of()), plan(config_of(offload="optimizer"))
    (before,), (rank,) = usual.classes, offloaded.classes
    assert rank.host == 8 * rank.trained_parameters > 0 and before.host == 0
    assert before.memory["optimizer"] - rank.memory["optimizer"] == rank.host
    assert usual.turns[0].trainer - offloaded.turns[0].trainer == rank.host
    assert offloaded.turns[0].host == rank.host


def test_activations_on_the_host_are_those_of_two_layers_on_the_gpu():
    kept = {"recompute": "none"}
    usual, offloaded = plan(config_of(**kept)), plan(config_of(offload="activations", **kept))
    (before,), (rank,) = usual.classes, offloaded.classes
    layers = len(rank.layers)
    assert rank.host_in_step == before.memory["activations"] and before.host_in_step == 0
    assert rank.memory["activations"] == pytest.approx(rank.host_in_step * 2 / layers, rel=1e-6)
    assert layers > 2 and rank.resident == before.resident and rank.host == 0
    in_rollout, in_update = offloaded.turns
    assert (in_rollout.host, in_update.host) == (0, rank.host_in_step)
    both = plan(config_of(offload="both", **kept))
    assert both.turns[1].host == rank.host_in_step + both.classes[0].host
    assert both.turns[0].host == both.classes[0].host == 8 * rank.trained_parameters


def test_copies_to_the_host_take_what_the_computation_does_not_hide():
    """64 GB/s at 70 %, each way; the forward is a third of a training step's computation."""
    kept = {"recompute": "none", "micro_batch_tokens": 8192}
    usual, offloaded = plan(config_of(**kept)), plan(config_of(offload="activations", **kept))
    assert usual.seconds is not None and offloaded.seconds is not None
    parts = offloaded.seconds.parts
    config = offloaded.config
    tokens = config.algorithm.prompts_per_step * config.algorithm.group_size * 1024
    passes = -(-tokens // (8192 * config.trainer.dp))
    one_way = passes * offloaded.classes[0].host_in_step / (64e9 * 0.7)
    compute = parts["compute"]
    assert one_way > compute  # so that neither is hidden whole
    assert parts["copies to the host"] == pytest.approx(2 * one_way - compute)
    rest = {name: s for name, s in parts.items() if name in usual.seconds.parts}
    assert rest == pytest.approx(usual.seconds.parts)


@pytest.mark.parametrize(
    ("config", "memory", "message"),
    [
        (
            config_of(share=0.9),
            40.0,
            "in the turn of the rollout a GPU of 40 GiB holds a trainer rank's",
        ),
        (config_of(), 30.0, "set trainer.offload=optimizer"),
        (
            config_of(offload="activations", recompute="none"),
            30.0,
            "set trainer.offload=both, or hold less",
        ),
        (config_of(share=0.9, offload="optimizer"), 40.0, "lower rollout.gpu_memory_utilization"),
        (config_of(offload="optimizer"), 30.0, "set placement.gives_back=weights"),
        (config_of(world_size=4, ep=4), 80.0, "trainer.world_size=4 is not rollout.engines=2"),
    ],
)
def test_what_does_not_fit_is_said_with_a_way_out(config, memory, message):
    problems = plan(config, memory).problems
    assert any(message in problem for problem in problems), problems


def test_layouts_that_take_turns_use_every_gpu_for_both_and_fit():
    facts = find("qwen3-30b-a3b")
    found = Search(facts, config_of(), assumed()).best(8)
    assert found
    for proposal in found:
        trainer, rollout = proposal.config.trainer, proposal.config.rollout
        assert trainer.world_size == rollout.engines * rollout.tp == 8
        made = make(facts, proposal.config, assumed())
        assert not made.problems
        assert max(turn.total for turn in made.turns) <= (1 - MARGIN) * 80 * GIB + 0.01 * 80 * GIB
    steps = [proposal.seconds.step for proposal in found]
    assert steps == sorted(steps)


def test_what_stands_on_one_node_and_is_too_large_for_it_is_said():
    search = Search(find("kimi-k2"), config_of(), assumed(64))
    assert any("an engine rank of rollout.tp=8 ep=true (one node" in one for one in reasons(search))


def test_what_cannot_take_turns_is_said():
    """Each alone has room on the one GPU."""
    search = Search(find("qwen3-30b-a3b"), config_of(share=0.9), assumed(1, 110.0))
    assert not search.best(1)
    (reason,) = reasons(search)
    assert "turn of the rollout, without a cache of keys and values" in reason
