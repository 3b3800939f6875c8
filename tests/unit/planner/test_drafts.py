"""What engines hold for tokens that are guessed."""

from __future__ import annotations

import pytest

from lora_moe_rl.config import RunConfig
from lora_moe_rl.planner.base import num_parameters, tensors_of_prediction
from lora_moe_rl.planner.compute import Lengths
from lora_moe_rl.planner.facts import find
from lora_moe_rl.planner.hardware import Hardware
from lora_moe_rl.planner.plan import Assumed, RunPlan, make


def planned(**said) -> RunPlan:
    """DeepSeek-V3, of which an engine has 8 ranks and the trainer 64."""
    args = {"speculative_config": {"num_speculative_tokens": 1} | said} if said else {}
    config = RunConfig.model_validate(
        {
            "model": {"path": "x", "max_length": 4096},
            "trainer": {"world_size": 64, "tp": 8, "ep": 64},
            "rollout": {"tp": 8, "ep": True, "engine_args": args},
        }
    )
    assumed = Assumed(Hardware(72, gpu_memory=141), "bf16", "bf16", Lengths(512, 512))
    return make(find("deepseek-v3"), config, assumed)


def test_a_prediction_layer_has_the_published_number_of_parameters():
    """DeepSeek-V3's README: 11.5 billion of its own, beside embeddings and head."""
    size = sum(tensor.size for tensor in tensors_of_prediction(find("deepseek-v3")))
    assert size == pytest.approx(11.5e9, rel=0.01)


def test_a_prediction_layer_is_one_layer_more_of_weights_and_cache():
    without, with_one = planned().engine, planned(method="mtp").engine
    assert with_one.kv_token - without.kv_token == (512 + 64) * 2
    # Over 8 ranks the experts, and a projection of two states to one on each of them.
    facts = find("deepseek-v3")
    experts = 256 * 3 * 7168 * 2048
    others = sum(t.size for t in tensors_of_prediction(facts)) - experts
    more = with_one.weights - without.weights
    assert 2 * experts / 8 + 2 * (2 * 7168 * 7168) < more < 2 * experts / 8 + 2 * others
    assert without.weights > 2 * num_parameters(facts) / 8


def test_a_model_of_its_own_is_said_not_to_be_counted():
    said = planned(method="eagle3", model="DIR").warnings
    assert said[-1].startswith("rollout.engine_args.speculative_config has engines load a model")
    assert planned(method="mtp").warnings == planned(method="ngram").warnings == planned().warnings
