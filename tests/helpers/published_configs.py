"""What the published `config.json` of one real model of each family says, as far as we read it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lora_moe_rl.adapters.families import FAMILIES, language_config
from lora_moe_rl.planner.facts import config_of

QWEN3_30B_A3B = config_of("qwen3_30b_a3b")
QWEN3_8B = config_of("qwen3_8b")
QWEN1_5_MOE_A2_7B = config_of("qwen1_5_moe_a2_7b")
MIXTRAL_8X7B = config_of("mixtral_8x7b")
DEEPSEEK_V2_LITE = config_of("deepseek_v2_lite")
DEEPSEEK_V3 = config_of("deepseek_v3")
KIMI_K2 = config_of("kimi_k2")
MOONLIGHT_16B_A3B = config_of("moonlight_16b_a3b")
GLM_4_5_AIR = config_of("glm_4_5_air")
GLM_4_7_FLASH = config_of("glm_4_7_flash")
QWEN3_NEXT_80B_A3B = config_of("qwen3_next_80b_a3b")
QWEN3_5_35B_A3B = config_of("qwen3_5_35b_a3b")
GPT_OSS_20B = config_of("gpt_oss_20b")
OLMOE_1B_7B = config_of("olmoe_1b_7b")
MINIMAX_M2 = config_of("minimax_m2")
LING_MINI_2_0 = config_of("ling_mini_2_0")
ERNIE_4_5_300B = config_of("ernie_4_5_300b_a47b")
HY3 = config_of("hy3")

PUBLISHED = {
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen3-8B": QWEN3_8B,
    "Qwen1.5-MoE-A2.7B": QWEN1_5_MOE_A2_7B,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
    "DeepSeek-V3": DEEPSEEK_V3,
    "Kimi-K2": KIMI_K2,
    "Moonlight-16B-A3B": MOONLIGHT_16B_A3B,
    "GLM-4.5-Air": GLM_4_5_AIR,
    "GLM-4.7-Flash": GLM_4_7_FLASH,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT_80B_A3B,
    "Qwen3.5-35B-A3B": QWEN3_5_35B_A3B,
    "Qwen3.5-35B-A3B, by itself": dict(language_config(QWEN3_5_35B_A3B)),
    "GPT-OSS-20B": GPT_OSS_20B,
    "OLMoE-1B-7B": OLMOE_1B_7B,
    "MiniMax-M2": MINIMAX_M2,
    "Ling-mini-2.0": LING_MINI_2_0,
    "ERNIE-4.5-300B-A47B": ERNIE_4_5_300B,
    "Hy3": HY3,
}


def shrunk(config: dict) -> dict:
    """A tiny config of the same family: every width another, so that none can stand for another."""
    sizes = {
        "num_hidden_layers": 4, "hidden_size": 48, "vocab_size": 64, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 10, "intermediate_size": 28,
        "moe_intermediate_size": 14, "shared_expert_intermediate_size": 22, "num_experts": 5,
        "num_local_experts": 5, "n_routed_experts": 5, "num_experts_per_tok": 2,
        "q_lora_rank": 18, "kv_lora_rank": 20, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6,
        "v_head_dim": 7, "n_group": 1, "topk_group": 1, "rotary_dim": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 9,
        "linear_value_head_dim": 12, "full_attention_interval": 2, "moe_num_experts": 5,
        "expert_hidden_dim": 14, "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 3,
    }  # fmt: skip
    if "text_config" in config:
        return config | {"text_config": shrunk(config["text_config"])}
    return config | {k: v for k, v in sizes.items() if config.get(k) is not None}


def hf_config(config: dict):
    """transformers' config object, of the language model."""
    import transformers

    config = dict(language_config(config))
    family = FAMILIES[config["architectures"][0]]
    if family.reference_class is not None:  # that transformers does not know
        return family.reference_class().config_class(**config | {"pad_token_id": None})
    # transformers has no class of type kimi_k2: it is DeepSeek-V3's.
    kind = str({"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"]))
    rest = {k: v for k, v in config.items() if k != "model_type"}
    return transformers.AutoConfig.for_model(kind, **rest)


def hf_model(config: dict, changes: Mapping[str, Any] = MappingProxyType({}), **options):
    """transformers' model as its checkpoint has it: around a language model inside a larger one is
    a vision tower, of small sizes. `changes` are of the language model."""
    import transformers

    language = hf_config(config)
    for key, value in changes.items():
        setattr(language, key, value)
    if (ours := FAMILIES[config["architectures"][0]].reference_class) is not None:
        return ours()(language)
    if "text_config" not in config:
        return transformers.AutoModelForCausalLM.from_config(language, **options)
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 16}
    kind = getattr(transformers, config["architectures"][0]).config_class
    parts = language.to_dict(), vision | {"out_hidden_size": language.hidden_size}
    whole = kind(text_config=parts[0], vision_config=parts[1])
    return transformers.AutoModelForImageTextToText.from_config(whole, **options)


# Of two layers, the first of them dense.
SMALL_DEEPSEEK_V3 = DEEPSEEK_V3 | {
    "num_hidden_layers": 2, "first_k_dense_replace": 1, "hidden_size": 32, "n_routed_experts": 5,
    "intermediate_size": 48, "moe_intermediate_size": 16, "q_lora_rank": 24, "kv_lora_rank": 16,
    "num_attention_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
