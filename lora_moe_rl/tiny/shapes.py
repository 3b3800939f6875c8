"""The two architectures the tiny models come in, as Hugging Face configs and seeded weights."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lora_moe_rl.tiny.tokenizer import VOCAB_SIZE, token_id

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
    "bos_token_id": token_id("<bos>"),
    "eos_token_id": token_id("<eos>"),
    "pad_token_id": token_id("<pad>"),
}

# Grouped-query attention with qk-norm, softmax router, every layer MoE; 2.0M parameters.
QWEN3_MOE = COMMON | {
    "hidden_size": 96,
    "intermediate_size": 192,
    "moe_intermediate_size": 192,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

# Multi-head latent attention with the published head sizes (vLLM's kernels are made for them),
# sigmoid router with a correction bias, one shared expert, first layer dense; 3.4M parameters.
DEEPSEEK_V3 = COMMON | {
    "hidden_size": 96,
    "intermediate_size": 192,
    "moe_intermediate_size": 96,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
CORRECTION_BIAS_STD = 0.1

# Keys that vLLM reads and transformers' config class does not write.
EXTRA_CONFIG = {
    "qwen3_moe": {},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
SHAPES = {"qwen3_moe": QWEN3_MOE, "deepseek_v3": DEEPSEEK_V3}


def build_model(name: str) -> PreTrainedModel:
    """The named model in float32, with weights from torch's default generator."""
    config = AutoConfig.for_model(name, **SHAPES[name])
    model = AutoModelForCausalLM.from_config(config).float()
    if name == "qwen3_moe":
        return model
    draw_biases(model)
    return model


def draw_biases(model: PreTrainedModel) -> None:
    """Draws the routers' corrections of a DeepSeek-V3: buffers that training leaves alone, so that
    the routers learn around them."""
    for layer in model.model.layers[model.config.first_k_dense_replace :]:
        bias = layer.mlp.gate.e_score_correction_bias
        bias.copy_(CORRECTION_BIAS_STD * torch.randn_like(bias))
