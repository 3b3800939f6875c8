"""What the published `config.json` of one real model of each family says, as far as we read it."""

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
    "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936,
    "max_position_embeddings": 40960, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
QWEN1_5_MOE_A2_7B = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
    "num_hidden_layers": 24, "hidden_size": 2048, "vocab_size": 151936,
    "max_position_embeddings": 8192, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 5632, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
    "decoder_sparse_step": 1, "sliding_window": 32768, "use_sliding_window": False,
}  # fmt: skip
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
    "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
    "sliding_window": None,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
    "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
    "num_hidden_layers": 27, "hidden_size": 2048, "vocab_size": 102400,
    "max_position_embeddings": 163840, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 129280,
    "max_position_embeddings": 163840, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "rope_scaling": YARN,
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "vocab_size": 163840, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "rope_scaling": YARN | {"factor": 32, "beta_fast": 1},
}  # fmt: skip
MOONLIGHT_16B_A3B = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "num_hidden_layers": 27, "hidden_size": 2048, "vocab_size": 163840,
    "max_position_embeddings": 8192, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
}  # fmt: skip
GLM_4_5_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
    "num_hidden_layers": 46, "hidden_size": 4096, "vocab_size": 151552,
    "max_position_embeddings": 131072, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": False,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.5,
}  # fmt: skip

PUBLISHED = {
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen1.5-MoE-A2.7B": QWEN1_5_MOE_A2_7B,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Kimi-K2": KIMI_K2,
    "Moonlight-16B-A3B": MOONLIGHT_16B_A3B,
    "GLM-4.5-Air": GLM_4_5_AIR,
}


def shrunk(config: dict) -> dict:
    """A tiny config of the same family: every width another, so that none can stand for another."""
    sizes = {
        "num_hidden_layers": 4, "hidden_size": 48, "vocab_size": 64, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 10, "intermediate_size": 28,
        "moe_intermediate_size": 14, "shared_expert_intermediate_size": 22, "num_experts": 5,
        "num_local_experts": 5, "n_routed_experts": 5, "num_experts_per_tok": 2,
        "q_lora_rank": 18, "kv_lora_rank": 20, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
        "v_head_dim": 7, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    return config | {k: v for k, v in sizes.items() if config.get(k) is not None}


def hf_config(config: dict):
    """transformers' config object."""
    import transformers

    # transformers has no class of type kimi_k2: it is DeepSeek-V3's.
    kind = str({"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"]))
    rest = {k: v for k, v in config.items() if k != "model_type"}
    return transformers.AutoConfig.for_model(kind, **rest)
