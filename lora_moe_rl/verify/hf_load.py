"""Hugging Face's model as the reference, where transformers 5.12.1 computes what was trained.

Mended: DeepSeek-V2's group-limited router asks for `num_experts`, which is not set, and its
attention leaves out YaRN's `mscale_all_dim`, which DeepSeek's own code and vLLM apply
(`modeling_deepseek_v2.py`; `DeepseekV3Attention` has it). The norms inside MLA have an epsilon of
1e-6 whatever config.json says, where Megatron-core and vLLM take `rms_norm_eps`. Under model_type
kimi_k2 the experts of a checkpoint would not be found.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

from lora_moe_rl.adapters.families import FAMILIES


def load(model_dir: Path) -> torch.nn.Module:
    """The model of a Hugging Face directory, in float32 on the CPU."""
    config = json.loads((Path(model_dir) / "config.json").read_text())
    (architecture,) = config["architectures"]
    model_class = getattr(transformers, architecture)
    known_type = FAMILIES[architecture].model_types[0]
    settings = model_class.config_class.from_dict(config | {"model_type": known_type})
    model = model_class.from_pretrained(model_dir, config=settings, dtype=torch.float32)
    for layer in model.model.layers:
        if hasattr(layer.self_attn, "kv_a_layernorm"):
            _mend_mla_norms(layer.self_attn, settings.rms_norm_eps)
        if architecture == "DeepseekV2ForCausalLM":
            _mend_deepseek_v2(layer, settings)
    return model.eval()


def _mend_mla_norms(attention: torch.nn.Module, eps: float) -> None:
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        if (norm := getattr(attention, name, None)) is not None:
            norm.variance_epsilon = eps


def _mend_deepseek_v2(layer: torch.nn.Module, settings) -> None:
    if hasattr(layer.mlp, "gate"):
        if hasattr(layer.mlp, "num_experts"):
            raise RuntimeError("transformers' DeepseekV2Moe has num_experts now: check this mend")
        layer.mlp.num_experts = settings.n_routed_experts
    plain = layer.self_attn.qk_head_dim**-0.5
    if layer.self_attn.scaling != plain:
        raise RuntimeError(
            "transformers' DeepseekV2Attention scales by itself now: check this mend"
        )
    rope = settings.rope_parameters
    if rope["rope_type"] == "yarn" and (all_dim := rope.get("mscale_all_dim")):
        layer.self_attn.scaling = plain * yarn_get_mscale(rope["factor"], all_dim) ** 2
