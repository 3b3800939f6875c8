"""Layouts that do not fit a model are refused with both numbers."""

import pytest
from published_configs import (
    GPT_OSS_20B,
    KIMI_K2,
    OLMOE_1B_7B,
    PUBLISHED,
    QWEN3_5_35B_A3B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B_A3B,
)

from lora_moe_rl.adapters.spec import AdapterSpec, ModelShape
from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.models import fit
from lora_moe_rl.models.fit import check_blocks, check_layout, check_start

OLMOE = ModelShape.from_hf_config(OLMOE_1B_7B | {"num_key_value_heads": 4})
QWEN, KIMI = ModelShape.from_hf_config(QWEN3_30B_A3B), ModelShape.from_hf_config(KIMI_K2)
SEPARATE = ModelShape.from_hf_config(QWEN3_5_35B_A3B)
BY_ITSELF = ModelShape.from_hf_config(PUBLISHED["Qwen3.5-35B-A3B, by itself"])
OSS = ModelShape.from_hf_config(GPT_OSS_20B)
NARROW = ModelShape.from_hf_config(KIMI_K2 | {"intermediate_size": 18436})
THIN = ModelShape.from_hf_config(QWEN3_30B_A3B | {"moe_intermediate_size": 772})
SHARED = ModelShape.from_hf_config(QWEN3_NEXT_80B_A3B | {"shared_expert_intermediate_size": 1026})

NEXT = ModelShape.from_hf_config(QWEN3_NEXT_80B_A3B | {"num_key_value_heads": 16})


@pytest.mark.parametrize(
    ("shape", "sections", "message"),
    [
        (QWEN, {"trainer": {"world_size": 3, "ep": 3}}, "trainer.ep=3.*128 experts"),
        (QWEN, {"trainer": {"world_size": 49, "pp": 49}}, "trainer.pp=49 .*49 pieces .*48 layers"),
        (
            QWEN,
            {"trainer": {"world_size": 8, "pp": 8, "vpp": 8}},
            "trainer.pp=8 with trainer.vpp=8 wants 64 pieces of a model of 48 layers",
        ),
        (QWEN, {"trainer": {"world_size": 8, "tp": 8}}, "trainer.tp=8.*4 key/value heads"),
        (QWEN, {"trainer": {"world_size": 3, "cp": 3}}, "trainer.cp=3 .*32 attention heads:"),
        (
            QWEN,
            {"trainer": {"world_size": 128, "tp": 2, "cp": 32}},
            "trainer.cp=32 .*16 attention heads, which trainer.tp=2 leaves a rank",
        ),
        (QWEN, {"rollout": {"tp": 3}}, "rollout.tp=3.*32 attention heads"),
        (OLMOE, {"rollout": {"tp": 8}}, "rollout.tp=8 .* 4 key/value heads, which vLLM does not"),
        (
            NARROW,
            {"trainer": {"world_size": 8, "tp": 8}},
            "trainer.tp=8 does not divide the model's 18436 columns of a dense MLP",
        ),
        (NARROW, {"rollout": {"tp": 8}}, "rollout.tp=8 .* 18436 columns of a dense MLP"),
        (SHARED, {"rollout": {"tp": 4}}, "rollout.tp=4 .* 1026 columns of a shared expert"),
        (THIN, {"rollout": {"tp": 8}}, "rollout.tp=8 .* 772 columns of an expert"),
        (QWEN, {"model": {"max_length": 50_000}}, "model.max_length=50000.*40960 positions"),
        (
            NEXT,
            {"trainer": {"world_size": 32, "tp": 2, "cp": 16}},
            "trainer.cp=16 does not divide the 8 key heads of linear attention that trainer.tp=2",
        ),
        (
            SEPARATE,
            {"refit": {"mode": "merged"}},
            "refit.mode=merged: checkpoints of Qwen3_5MoeForConditionalGeneration have the experts",
        ),
        (NEXT, {"rollout": {"tp": 32}}, "rollout.tp=32 does not divide the model's 16"),
        (
            OSS,
            {"trainer": {"world_size": 2, "tp": 2, "etp": 2}},
            "trainer.etp=2.*biases.*trainer.ep",
        ),
        (OSS, {"rollout": {"tp": 2, "fully_sharded": True}}, "rollout.fully_sharded=true"),
        (OSS, {"rollout": {"dp": 2, "ep": True}}, "rollout.dp=2.*rollout.engines"),
        (OSS, {"rollout": {"tp": 16}}, "rollout.tp=16.*8 key/value heads, as vLLM's"),
        (OSS, {"refit": {"mode": "merged"}}, "refit.mode=merged.*refit.mode=adapter"),
        (OSS, {"adapter": {"expert_layout": "shared_outer"}}, "expert_layout=shared_outer"),
    ],
)
def test_refused(shape, sections, message):
    with pytest.raises(ConfigError, match=message):
        check_layout(shape, RunConfig.model_validate(sections))


def test_linear_attention_is_not_of_quantised_bases():
    for shape in (NEXT, SEPARATE):
        with pytest.raises(ConfigError, match="the base is fp8, .*linear attention"):
            check_layout(shape, RunConfig(), "fp8")


def test_on_gpus_linear_attention_wants_its_kernels(monkeypatch):
    monkeypatch.setattr(fit, "has_transformer_engine", lambda: True)
    config = RunConfig.model_validate({"trainer": {"device": "cuda"}})
    with pytest.raises(ConfigError, match="flash-linear-attention, which is not installed"):
        check_layout(NEXT, config)


def test_experts_of_one_stack_do_not_start_from_their_own_weights():
    config = RunConfig.model_validate({"adapter": {"init": "olora"}})
    spec = AdapterSpec.build(OSS, config.adapter, servable=True)
    with pytest.raises(ConfigError, match="adapter.init=olora .*leave experts.down, .* out of ada"):
        check_start(spec, config)
    attention = config.adapter.model_copy(update={"targets": ["q_proj", "o_proj"]})
    check_start(AdapterSpec.build(OSS, attention, servable=True), config)
    check_start(AdapterSpec.build(QWEN, config.adapter, servable=True), config)


def test_layouts_that_fit():
    check_layout(THIN, RunConfig(rollout={"tp": 8, "ep": True}))
    check_layout(QWEN, RunConfig(trainer={"world_size": 16, "tp": 4, "pp": 2, "ep": 8}))
    check_layout(KIMI, RunConfig(trainer={"world_size": 64, "tp": 8, "ep": 64}))
    check_layout(KIMI, RunConfig(trainer={"world_size": 64, "tp": 8, "cp": 8, "ep": 64}))
    check_layout(NEXT, RunConfig(trainer={"world_size": 16, "tp": 2, "cp": 8}))
    for shape in (NEXT, BY_ITSELF):
        check_layout(shape, RunConfig(refit={"mode": "merged"}, rollout={"tp": 2}))
    for cp in (2, 4, 8, 32):  # four key/value heads, which several ranks may share
        check_layout(QWEN, RunConfig(trainer={"world_size": cp, "cp": cp}))
    etp2 = RunConfig(trainer={"world_size": 16, "tp": 2, "pp": 8, "etp": 2})
    check_layout(KIMI, etp2)
    check_layout(KIMI, etp2, "fp8")
    check_layout(QWEN, etp2, "int4")
    with pytest.raises(ConfigError, match="trainer.etp=4 cuts experts of the width 768, fp8"):
        check_layout(QWEN, RunConfig(trainer={"world_size": 4, "tp": 4, "etp": 4}), "fp8")


@pytest.mark.parametrize(
    ("shape", "rollout", "message"),
    [
        (
            QWEN,
            {"tp": 4},
            r"tp=4 cuts experts.gate of layer 0, of the width 768, into 192, .*ep=true",
        ),
        (
            KIMI,
            {"tp": 32, "ep": True},
            r"tp=32 cuts mlp.gate .*18432, into 576, .*blocks of",
        ),
    ],
)
def test_blocks_of_fp8_weights_are_not_cut(shape, rollout, message):
    with pytest.raises(ConfigError, match=message):
        check_blocks(shape, RunConfig(rollout=rollout), "fp8")
    check_blocks(shape, RunConfig(rollout=rollout), "int4")


def test_ranks_that_have_whole_blocks():
    check_blocks(QWEN, RunConfig(rollout={"tp": 2}), "fp8")
    check_blocks(
        QWEN, RunConfig(rollout={"tp": 8, "ep": True}), "fp8"
    )  # key/value heads are repeated
    check_blocks(KIMI, RunConfig(rollout={"tp": 16}), "fp8")
