"""Which tensors the rule lets trainer and engine share, and why not the others."""

from __future__ import annotations

import re

import pytest
from transformers import AutoConfig

from lora_moe_rl.adapters.families import ModelShape
from lora_moe_rl.base.layout import rule, stacks
from lora_moe_rl.config import RolloutConfig, TrainerConfig
from lora_moe_rl.tiny.shapes import EXTRA_CONFIG, SHAPES, build_model


def shape_of(name: str, **changes) -> ModelShape:
    config = AutoConfig.for_model(name, **SHAPES[name] | changes).to_dict() | EXTRA_CONFIG[name]
    architecture = {"qwen3_moe": "Qwen3MoeForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
    return ModelShape.from_hf_config(config | {"architectures": [architecture[name]]})


def experts_of(shape, trainer=None, rollout=None):
    found = rule(shape, TrainerConfig(**trainer or {}), RolloutConfig(**rollout or {}))
    return [tensor for tensor in found if ".experts." in tensor.name]


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [
        ({}, {}),
        ({"world_size": 2, "tp": 2}, {"tp": 2, "ep": True}),
        ({"world_size": 2, "tp": 2, "ep": 2}, {"tp": 2, "ep": True}),
        ({"world_size": 2, "ep": 2}, {"tp": 2, "ep": True}),
        ({}, {"tp": 2, "ep": True}),
        ({"world_size": 4, "tp": 2, "ep": 4}, {}),
        ({"world_size": 2, "pp": 2}, {}),
        ({"world_size": 2, "tp": 2, "etp": 2}, {"tp": 2}),
        ({"world_size": 4, "tp": 2, "etp": 2, "ep": 2}, {"tp": 2}),
    ],
)
def test_experts_are_shared_when_each_is_cut_into_as_many_pieces(trainer, rollout):
    for name in SHAPES:
        found = experts_of(shape_of(name), trainer, rollout)
        assert found and not any(tensor.reason for tensor in found)


@pytest.mark.parametrize(
    ("trainer", "rollout", "message"),
    [
        ({}, {"tp": 2}, "engine cuts each expert into 2 .* the trainer into 1"),
        ({"world_size": 2, "tp": 2, "etp": 2}, {}, "into 1 .* the trainer into 2"),
        ({"world_size": 2, "tp": 2, "etp": 2}, {"tp": 2, "ep": True}, "the trainer into 2"),
    ],
)
def test_experts_in_other_pieces_are_not_shared_and_it_says_why(trainer, rollout, message):
    for tensor in experts_of(shape_of("qwen3_moe"), trainer, rollout):
        assert re.search(message, tensor.reason)


def test_a_width_that_vllm_would_pad_is_not_shared():
    odd = shape_of("qwen3_moe", moe_intermediate_size=51)
    tensors = experts_of(odd, {"world_size": 2, "tp": 2, "etp": 2}, {"tp": 2})
    assert all("does not divide the 51 columns" in tensor.reason for tensor in tensors)


def test_stacks_of_a_layer():
    """Of the tiny DeepSeek-V3: hidden 96, experts 8 of width 96, the first layer dense."""
    gate_up, down, *rest = stacks(shape_of("deepseek_v3"), 2)
    assert gate_up.name == "model.layers.1.mlp.experts.routed_experts.w13_weight"
    assert gate_up.megatron == "decoder.layers.1.mlp.experts.linear_fc1"
    assert gate_up.shape == (2, 8, 96, 96) and down.shape == (2, 8, 96, 48)
    assert down.name.endswith("w2_weight") and down.megatron.endswith("linear_fc2")
    assert [one.layer for one in rest] == [2, 2, 3, 3]


@pytest.mark.parametrize("name", SHAPES)
def test_the_rule_counts_every_parameter_of_the_model(name):
    """Against transformers' own model, but for the norms within attention."""
    found = rule(shape_of(name), TrainerConfig(), RolloutConfig())
    model = build_model(name)
    small = sum(
        value.numel()
        for key, value in model.named_parameters()
        if key.endswith(("q_norm.weight", "k_norm.weight", "a_layernorm.weight"))
    )
    assert sum(t.elements for t in found) == sum(p.numel() for p in model.parameters()) - small


def others_of(name, trainer, rollout, form=None):
    found = rule(shape_of(name), TrainerConfig(**trainer), RolloutConfig(**rollout), form)
    return {tensor.name.rpartition("*.")[2]: tensor for tensor in found[:-1]}


@pytest.mark.parametrize(
    ("trainer", "rollout", "apart"),
    [
        ({}, {}, set()),
        ({"world_size": 2, "tp": 2}, {"tp": 2}, set()),
        ({}, {"tp": 2}, set()),
        ({"world_size": 2, "tp": 2}, {}, {"self_attn.qkv_proj.weight"}),
    ],
)
def test_linears_are_shared_where_rows_of_a_trainer_rank_stand_together(trainer, rollout, apart):
    found = others_of("qwen3_moe", trainer, rollout)
    names = "self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "lm_head.weight"
    assert {name for name in names if found[name].reason} == apart


def test_linears_of_latent_attention_are_shared_where_the_engine_has_more_ranks():
    found = others_of("deepseek_v3", {}, {"tp": 2})
    for name in ("mlp.gate_up_proj", "self_attn.fused_qkv_a_proj", "self_attn.kv_b_proj"):
        assert not found[f"{name}.weight"].reason


@pytest.mark.parametrize(
    ("changes", "trainer", "rollout", "form", "message"),
    [
        ({}, {}, {"tp": 4}, None, "several ranks the same of 2 heads"),
        ({}, {"world_size": 2, "tp": 2}, {}, None, "trainer.tp to a divisor of rollout.tp"),
        ({}, {}, {}, "fp8", "as numbers"),
    ],
)
def test_why_q_k_and_v_are_not_shared(changes, trainer, rollout, form, message):
    found = others_of("qwen3_moe", trainer, rollout, form)
    assert message in found["self_attn.qkv_proj.weight"].reason


def test_a_vocabulary_that_the_trainer_pads_further_is_not_shared():
    shape = shape_of("qwen3_moe", vocab_size=127)
    trainer = TrainerConfig(world_size=3, tp=3)
    found = {one.name: one for one in rule(shape, trainer, RolloutConfig())}
    assert "pads the vocabulary" in found["lm_head.weight"].reason
