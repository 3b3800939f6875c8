"""What a config.json may not ask for, since trainer or engine would compute something else."""

from __future__ import annotations

import pytest

from lora_moe_rl.adapters.families import check_variant
from lora_moe_rl.errors import ModelError

YARN = {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
QWEN3, QWEN2 = "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM"
V2, V3, GLM = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"
MIXTRAL, DENSE, NEXT = "MixtralForCausalLM", "Qwen3ForCausalLM", "Qwen3NextForCausalLM"
SIZES = {
    "num_hidden_layers": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "shared_expert_intermediate_size": 8,
}
QWEN3_5, WITH_IMAGES = "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"
MROPE = {"rope_type": "default", "mrope_section": [11, 11, 10]}
OSS = "GptOssForCausalLM"
OSS_ROPE = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
OSS_PLAIN = {"num_hidden_layers": 3, "sliding_window": 128, "rope_scaling": OSS_ROPE}
SLIDING, FULL = "sliding_attention", "full_attention"
OLMOE, MINIMAX = "OlmoeForCausalLM", "MiniMaxM2ForCausalLM"
BAILING = "BailingMoeV2ForCausalLM"
FLASH = "Glm4MoeLiteForCausalLM"
HY3 = "HYV3ForCausalLM"
HY3_SIZES = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
    "expert_hidden_dim": 48,
    "router_scaling_factor": 2.826,
    "num_shared_experts": 1,
}
ERNIE, UNTIED = "Ernie4_5_MoeForCausalLM", {"tie_word_embeddings": False}
FLASH_SIZES = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
OF_HEADS = {"hidden_size": 2048, "num_attention_heads": 16}
M2 = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "head_dim": 128,
    "rotary_dim": 64,
}  # fmt: skip

LING = {
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "embedding_dropout": 0.0,
    "moe_intermediate_size": 512,
    "head_dim": 128,
}

REFUSED = [
    (QWEN3, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (QWEN3, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    (QWEN3, {"attention_bias": True}, "attention_bias"),
    (QWEN3, {"rope_scaling": YARN}, "rope type 'yarn'"),
    (
        QWEN3,
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN},
        "rope_parameters has the rope type 'default', rope_scaling 'yarn'",
    ),
    (DENSE, {"tie_word_embeddings": True}, "`lora-moe-rl untie MODEL --out DIR`"),
    (DENSE, {"attention_bias": True}, "attention_bias"),
    (QWEN2, {"use_sliding_window": True, "sliding_window": 32768}, "use_sliding_window"),
    (MIXTRAL, {"sliding_window": 4096, "max_position_embeddings": 32768}, "at most 4096 tokens"),
    (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    (V2, {"norm_topk_prob": True}, "norm_topk_prob=true"),
    (V2, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    (V2, {"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
    (V3, {"rope_scaling": YARN | {"attention_factor": 2}}, "attention_factor"),
    (V3, {"rope_scaling": {"type": "yarn", "factor": 40}}, "assumes 4096"),
    (V3, {"norm_topk_prob": False}, "norm_topk_prob=false"),
    (V3, {"topk_method": "noaux_tc"}, "scoring_func=None"),
    (V3, {"rope_interleave": False}, "rope_interleave=false"),
    (GLM, {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    (FLASH, {"num_hidden_layers": 3}, "first_k_dense_replace is missing"),
    (
        FLASH,
        FLASH_SIZES | {"first_k_dense_replace": 2},
        "first_k_dense_replace=2 and mlp_layer_types",
    ),
    (FLASH, FLASH_SIZES | {"mlp_layer_types": ["sparse"] * 3}, "first_k_dense_replace=1 and mlp_"),
    (FLASH, FLASH_SIZES | {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    (FLASH, FLASH_SIZES | {"rope_interleave": False}, "rope_interleave=false"),
    (FLASH, FLASH_SIZES | {"norm_topk_prob": False}, "norm_topk_prob=false"),
    (FLASH, FLASH_SIZES | {"rope_scaling": YARN}, "rope type 'yarn'"),
    (NEXT, SIZES | {"rope_scaling": YARN}, "rope type 'yarn'"),
    (NEXT, SIZES | {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    (NEXT, SIZES | {"layer_types": ["sliding_attention"] * 2}, "layer_types has sliding_attention"),
    (NEXT, SIZES | {"layer_types": ["full_attention"]}, "1 entries for 2 layers"),
    (NEXT, SIZES | {"layer_scale": True}, "layer_scale=true"),
    (NEXT, SIZES | {"linear_num_value_heads": 3}, "linear_num_value_heads=3 is no multiple"),
    (NEXT, SIZES | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
    (NEXT, SIZES | {"attn_output_gate": False}, "attn_output_gate=false"),
    (QWEN3_5, SIZES | {"linear_num_value_heads": 3}, "linear_num_value_heads=3 is no multiple"),
    (QWEN3_5, SIZES | {"rope_parameters": MROPE}, "mrope_interleaved=false"),
    (QWEN3_5, SIZES | {"rope_parameters": YARN}, "rope type 'yarn'"),
    (QWEN3_5, SIZES | {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    (QWEN3_5, SIZES | {"norm_topk_prob": False}, "norm_topk_prob=false"),
    (QWEN3_5, SIZES | {"mlp_only_layers": [1]}, "every layer of transformers' model has experts"),
    (WITH_IMAGES, {"text_config": SIZES | {"layer_scale": True}}, "layer_scale=true"),
    (
        WITH_IMAGES,
        {"text_config": SIZES, "tie_word_embeddings": True},
        "tie_word_embeddings=true",
    ),
    (
        WITH_IMAGES,
        {"text_config": SIZES | {"quantization_config": {"quant_method": "fp8"}}},
        "text_config has a quantization_config",
    ),
    (OSS, OSS_PLAIN | {"quantization_config": {"quant_method": "mxfp4"}}, "lora-moe-rl dequantise"),
    (OSS, OSS_PLAIN | {"swiglu_limit": 5.0}, "swiglu_limit=5.0"),
    (OSS, OSS_PLAIN | {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
    (OSS, OSS_PLAIN | {"attention_bias": False}, "attention_bias=false"),
    (OSS, OSS_PLAIN | {"layer_types": [FULL, SLIDING, FULL]}, "in turn"),
    (OSS, OSS_PLAIN | {"sliding_window": None}, "sliding_window is missing"),
    (OSS, OSS_PLAIN | {"rope_scaling": None}, "rope type 'default'"),
    (OSS, OSS_PLAIN | {"rope_scaling": YARN}, "lacks beta_fast, beta_slow"),
    (OSS, OSS_PLAIN | {"rope_scaling": OSS_ROPE | {"mscale": 0.7}}, "mscale are not supported"),
    (OSS, OSS_PLAIN | {"tie_word_embeddings": True}, "tie_word_embeddings"),
    (OLMOE, {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    (OLMOE, {"norm_topk_prob": True}, "norm_topk_prob=true"),
    (OLMOE, {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
    (OLMOE, OF_HEADS | {"head_dim": 64}, "head_dim=64"),
    (OLMOE, {"attention_bias": True}, "attention_bias"),
    (MINIMAX, M2 | {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    (MINIMAX, {"scoring_func": "sigmoid"}, "use_routing_bias=None"),
    (MINIMAX, M2 | {"use_qk_norm": False}, "use_qk_norm=False"),
    (MINIMAX, M2 | {"qk_norm_type": "per_head"}, "qk_norm_type='per_head'"),
    (MINIMAX, M2 | {"shared_intermediate_size": 1024}, "shared_intermediate_size=1024"),
    (MINIMAX, M2 | {"sliding_window": 4096}, "sliding_window=4096"),
    (MINIMAX, M2 | {"attn_type_list": [1, 0]}, "attn_type_list"),
    (MINIMAX, M2 | {"partial_rotary_factor": 1.0}, "partial_rotary_factor=1.0"),
    (MINIMAX, M2 | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (BAILING, LING | {"use_rmsnorm": None}, "use_rmsnorm=None"),
    (BAILING, LING | {"use_qk_norm": False}, "use_qk_norm=False"),
    (BAILING, LING | {"score_function": "softmax"}, "score_function='softmax'"),
    (BAILING, LING | {"moe_router_enable_expert_bias": False}, "enable_expert_bias=False"),
    (BAILING, LING | {"use_qkv_bias": True}, "use_qkv_bias=True"),
    (BAILING, LING | {"use_bias": True}, "use_bias=True"),
    (BAILING, LING | {"norm_head": True}, "norm_head=True"),
    (BAILING, LING | {"embedding_dropout": 0.1}, "embedding_dropout=0.1"),
    (BAILING, LING | {"n_group": None}, "n_group=None"),
    (BAILING, LING | {"norm_topk_prob": False}, "norm_topk_prob=false"),
    (BAILING, LING | {"moe_shared_expert_intermediate_size": 1024}, "size=1024"),
    (BAILING, LING | {"rotary_dim": 64, "partial_rotary_factor": 1.0}, "rotary_dim=64"),
    (BAILING, LING | {"rope_scaling": YARN}, "rope type 'yarn'"),
    (BAILING, LING | {"num_nextn_predict_layers": 1}, "predict_layers=1"),
    (BAILING, LING | {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (BAILING, {k: LING[k] for k in LING if k != "embedding_dropout"}, "is missing"),
    (HY3, HY3_SIZES | {"qk_norm": False}, "qk_norm=false"),
    (HY3, HY3_SIZES | {"route_norm": False}, "route_norm=false"),
    (HY3, HY3_SIZES | {"moe_router_use_sigmoid": False}, "moe_router_use_sigmoid=false"),
    (HY3, HY3_SIZES | {"moe_router_enable_expert_bias": False}, "enable_expert_bias=false"),
    (HY3, HY3_SIZES | {"expert_hidden_dim": 64}, "and expert_hidden_dim=64 differ"),
    (HY3, HY3_SIZES | {"router_scaling_factor": None}, "router_scaling_factor is missing"),
    (HY3, HY3_SIZES | {"num_shared_experts": 0}, "num_shared_experts=0"),
    (HY3, HY3_SIZES | {"first_k_dense_replace": 2}, "first_k_dense_replace=2 and mlp_layer_types"),
    (HY3, HY3_SIZES | {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
    (HY3, HY3_SIZES | {"attention_bias": True}, "attention_bias"),
    (ERNIE, {}, "tie_word_embeddings=true"),
    (ERNIE, UNTIED | {"use_bias": True}, "use_bias=true"),
    (ERNIE, UNTIED | {"moe_k": 1}, "moe_k=1"),
    (ERNIE, UNTIED | {"moe_norm_min": 0.1}, "moe_norm_min=0.1"),
    (ERNIE, UNTIED | {"moe_gate_act": "sigmoid"}, "moe_gate_act='sigmoid'"),
    (ERNIE, UNTIED | {"moe_use_aux_free": False}, "moe_use_aux_free=False"),
    (ERNIE, UNTIED | {"use_moe": False}, "use_moe=False"),
    (ERNIE, UNTIED | {"rope_scaling": YARN}, "rope type 'yarn'"),
]
ALLOWED = [
    (QWEN3, {"norm_topk_prob": False, "rope_scaling": None}),
    (DENSE, {"tie_word_embeddings": False, "use_sliding_window": False}),
    (QWEN2, {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21}),
    (MIXTRAL, {"sliding_window": None, "num_experts_per_tok": 2}),
    (V2, {"rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    (V3, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}),
    (NEXT, SIZES | {"layer_types": ["linear_attention", "full_attention"]}),
    (QWEN3_5, SIZES | {"rope_parameters": MROPE | {"mrope_interleaved": True}}),
    (WITH_IMAGES, {"text_config": SIZES | {"mtp_num_hidden_layers": 1}, "vision_config": {}}),
    (GLM, {"attention_bias": True, "partial_rotary_factor": 0.5}),
    (FLASH, FLASH_SIZES | {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    (FLASH, FLASH_SIZES | {"rope_interleave": True, "num_nextn_predict_layers": 1}),
    (OSS, OSS_PLAIN | {"attention_bias": True, "layer_types": [SLIDING, FULL, SLIDING]}),
    (MINIMAX, M2 | {"partial_rotary_factor": 0.5, "attn_type_list": [1, 1], "use_mtp": True}),
    (BAILING, LING | {"rotary_dim": 64, "partial_rotary_factor": 0.5}),
    (BAILING, LING | {"rotary_dim": 64, "num_nextn_predict_layers": 0, "use_bias": False}),
    (HY3, HY3_SIZES | {"mlp_layer_types": ["dense", "sparse", "sparse"], "qk_norm": True}),
    (ERNIE, UNTIED | {"moe_norm_min": 1e-12, "moe_gate_act": "softmax", "moe_use_aux_free": True}),
    (OLMOE, OF_HEADS | {"clip_qkv": None, "rms_norm_eps": 1e-5, "num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("architecture", "config", "message"), REFUSED)
def test_refused(architecture, config, message):
    with pytest.raises(ModelError, match=f"config.json of {architecture}: ") as raised:
        check_variant(architecture, config)
    assert message in str(raised.value)


@pytest.mark.parametrize(("architecture", "config"), ALLOWED)
def test_allowed(architecture, config):
    check_variant(architecture, config)
