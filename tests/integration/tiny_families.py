"""Tiny models of every family as Hugging Face directories: random weights, awkward routing.

Nothing in them is left at a default that would hide a mistake: norm weights are not one, biases
and router corrections not zero, and the first layer is dense wherever a family allows it. MLA keeps
the published head sizes, which vLLM's kernels are made for.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from lora_moe_rl.adapters.families import FAMILIES as OURS
from lora_moe_rl.verify.hf_load import reference_class

VOCAB_SIZE = 131  # what two tensor-parallel ranks do not divide
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
}
GQA = {"num_key_value_heads": 2, "head_dim": 32}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 48,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

ABSENT = object()  # a key that the family has not
# initializer_range: at 0.07 float32 of engines is itself 5e-6 off.
QWEN3_5 = GQA | {
    "intermediate_size": ABSENT,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "initializer_range": 0.05,
    "rope_parameters": COMMON["rope_parameters"]
    | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
# The vision tower of the published model, which is there and not used.
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": COMMON["hidden_size"],
    "num_position_embeddings": 16,
}

# name: (transformers' class, its config, keys of published configs that the class does not write)
FAMILIES = {
    "qwen3_moe": (
        "Qwen3Moe",
        GQA
        | {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 48,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
        {},
    ),
    "qwen3": ("Qwen3", GQA, {}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
        },
        {},
    ),
    # Two value heads to a key head, sizes that differ, a dense layer, attention in the middle.
    "qwen3_next": (
        "Qwen3Next",
        GQA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_conv_kernel_dim": 4,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [2],
            "initializer_range": 0.07,  # above, float32 of transformers is itself 1e-5 off
            "rope_parameters": COMMON["rope_parameters"] | {"partial_rotary_factor": 0.25},
        },
        {},
    ),
    # The same with linears of their own for gates, betas and decays, and three positions a token.
    "qwen3_5_moe": ("Qwen3_5Moe", QWEN3_5, {}),
    "qwen3_5_moe_published": ("Qwen3_5Moe", QWEN3_5, {}),
    "mixtral": (
        "Mixtral",
        GQA | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        {},
    ),
    # Groups by their best expert, and fewer groups than half of top-k.
    "deepseek_v2": (
        "DeepseekV2",
        MLA
        | {
            "q_lora_rank": 48,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 4.0,
            "rope_parameters": YARN,
        },
        {"scoring_func": "softmax"},
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        MLA
        | {
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
        },
        {"scoring_func": "softmax"},
    ),
    # Groups by the sum of their best two experts, with top-k not twice the groups.
    "deepseek_v3": (
        "DeepseekV3",
        MLA
        | {
            "q_lora_rank": 48,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "rope_parameters": YARN,
        },
        SIGMOID,
    ),
    "moonlight": (
        "DeepseekV3",
        MLA
        | {
            "q_lora_rank": None,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.446,
        },
        SIGMOID,
    ),
    "kimi_k2": (
        "DeepseekV3",
        MLA
        | {
            "q_lora_rank": 48,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.827,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        SIGMOID | {"model_type": "kimi_k2"},
    ),
    "glm4_moe": (
        "Glm4Moe",
        GQA
        | {
            "moe_intermediate_size": 48,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "attention_bias": True,
            "use_qk_norm": True,
            "rope_parameters": COMMON["rope_parameters"] | {"partial_rotary_factor": 0.25},
        },
        {},
    ),
    # Queries, keys and values in one linear, groups by their best two, two shared experts.
    "bailing_moe_v2": (
        "BailingMoeV2",
        GQA
        | {
            "moe_intermediate_size": 48,
            "num_experts": 12,
            "num_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "pad_token_id": 0,
            "rope_parameters": COMMON["rope_parameters"] | {"partial_rotary_factor": 0.5},
        },
        {
            "model_type": "bailing_moe",
            "use_rmsnorm": True,
            "norm_topk_prob": True,
            "score_function": "sigmoid",
            "router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": 48,
            "rotary_dim": 16,
        },
    ),
    # The sizes of heads are the published ones, which are not those of other MLA.
    "glm4_moe_lite": (
        "Glm4MoeLite",
        MLA
        | {
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
            "q_lora_rank": 48,
            "n_routed_experts": 6,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
        },
        {"topk_method": "noaux_tc"},
    ),
    # A window and a YaRN that the longest sequences go beyond; activations that reach the clamp.
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 48,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 16,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,  # which vLLM has in its code
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
        {},
    ),
    # Norms over all heads, whose weights differ from head to head.
    "olmoe": (
        "Olmoe",
        {
            "hidden_size": 128,
            "num_key_value_heads": 2,
            "intermediate_size": 48,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
        },
        {},
    ),
    # The rotated part is said by rotary_dim alone, as in the published config.
    "minimax_m2": (
        "MiniMaxM2",
        GQA
        | {
            "intermediate_size": 48,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "rope_parameters": COMMON["rope_parameters"] | {"partial_rotary_factor": 0.5},
        },
        {
            "partial_rotary_factor": None,
            "rotary_dim": 16,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "num_mtp_modules": 3,
        },
    ),
    # The shared experts, the router and its correction have other names in transformers' model.
    "hy_v3": (
        "HYV3",
        GQA
        | {
            "num_hidden_layers": 3,
            "moe_intermediate_size": 48,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 2,
            "router_scaling_factor": 2.826,
        },
        {"expert_hidden_dim": 48, "first_k_dense_replace": 1, "qk_norm": True, "route_norm": True},
    ),
    # The last layer dense too, and an interval that leaves out one in the middle.
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "hidden_size": 128,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 48,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "initializer_range": 0.07,  # above, float32 of transformers is itself 7e-6 off
        },
        {"num_nextn_predict_layers": 1},
    ),
}

DENSE = ("qwen3",)


def save(name: str, folder: Path, **changes) -> torch.nn.Module:
    """Writes the named model to `folder` and returns it, in float32; `changes`: other sizes."""
    kind, sizes, published = FAMILIES[name]
    sizes = {key: value for key, value in (COMMON | sizes | changes).items() if value is not ABSENT}
    model_class = getattr(transformers, f"{kind}ForCausalLM", None) or reference_class(
        OURS[f"{kind}ForCausalLM"]
    )
    if name.endswith("_published"):
        model_class = getattr(transformers, f"{kind}ForConditionalGeneration")
        sizes = {"text_config": sizes, "vision_config": VISION}
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes)).float().eval()
    for key, value in model.state_dict().items():
        if value.ndim == 1 or key.endswith("_bias"):  # norms, biases, sinks, router corrections
            value += 0.1 * torch.randn_like(value)
        if kind == "Ernie4_5_Moe" and key.endswith("mlp.gate.weight"):  # transformers leaves zeros
            value += 0.1 * torch.randn_like(value)
        if kind == "GptOss" and key.endswith("gate_up_proj"):  # one in ten reaches the clamp
            value *= 5
        if kind == "GptOss" and key.endswith("down_proj"):
            value /= 5
    model.save_pretrained(folder)
    path = folder / "config.json"
    written = json.loads(path.read_text())
    if kind != "Qwen3_5Moe":  # whose published configs have it as transformers 5 writes it
        written = _published_rope(written)
    elif "text_config" in written:
        _as_published(folder / "model.safetensors")
    if kind == "Ernie4_5_Moe":
        _add(folder / "model.safetensors", "model.mtp_linear_proj.0.weight")
    path.write_text(json.dumps(written | published, indent=2))
    return model


def _add(path: Path, name: str) -> None:
    """A weight of a prediction layer, as published models have it and transformers does not."""
    save_file(load_file(path) | {name: torch.zeros(64, 128)}, path, {"format": "pt"})


def _as_published(path: Path) -> None:
    """Experts of a layer in one, and a prediction layer, which transformers does not write."""
    tensors = load_file(path)
    layers: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        block, _, rest = name.partition(".experts.")
        number, part, _ = rest.split(".")
        layers.setdefault(block, {})[int(number), part] = tensors.pop(name)
    for block, parts in layers.items():
        gate, up, down = (
            torch.stack([parts[n, f"{part}_proj"] for n in range(len(parts) // 3)])
            for part in ("gate", "up", "down")
        )
        tensors[f"{block}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        tensors[f"{block}.experts.down_proj"] = down
    tensors["mtp.fc.weight"] = torch.zeros(64, 128)
    save_file(tensors, path, {"format": "pt"})


def _published_rope(config: dict) -> dict:
    """The rotary embedding as published configs give it, not as transformers 5 writes it."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    return config | {"rope_scaling": None if kind == "default" else rope | {"type": kind}}
