"""GPT-OSS. GQA with biases, attention sinks and a sliding window in every other layer; experts with
biases and a clamped SwiGLU; the router's scores are a softmax over the chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family

# What vLLM 0.31 and Megatron-Bridge 0.6.2 have in their code, whatever config.json says.
FIXED = {"swiglu_limit": 7.0, "hidden_act": "silu", "rms_norm_eps": 1e-5}
ROPE = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def refused(c: Config) -> Iterator[str]:
    if c.get("quantization_config"):
        yield (
            "a quantised checkpoint (quant_method "
            f"{c['quantization_config'].get('quant_method')!r}) is not supported for this family: "
            f"experts with biases are trained and served as numbers; {refusals.AS_NUMBERS}"
        )
    for key, value in FIXED.items():
        if c.get(key, value) != value:
            yield f"{key}={c[key]!r} is not supported: vLLM has {value!r} in its code"
    if not c.get("attention_bias", True):
        yield "attention_bias=false is not supported: vLLM has biases in its code"
    layers = c.get("layer_types")
    if layers is not None and layers != _alternating(c["num_hidden_layers"]):
        yield "layer_types is not sliding_attention and full_attention in turn, as vLLM has it"
    if not c.get("sliding_window"):
        yield "sliding_window is missing: every other layer has one"
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    yield from refusals.usual(
        {key: value for key, value in c.items() if key not in ("hidden_act", "attention_bias")},
        ("yarn",),
        rope_keys=("truncate",),
    )
    if absent := [key for key in ROPE if key not in rope]:
        yield f"the rotary embedding lacks {', '.join(absent)}, which vLLM wants"
    if scaled := [key for key in ("mscale", "mscale_all_dim") if rope.get(key) is not None]:
        yield f"rope parameters {', '.join(scaled)} are not supported: vLLM does not read them"


def _alternating(layers: int) -> list[str]:
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]


def bridge() -> type:
    from megatron.bridge.models.gpt_oss.gpt_oss_bridge import GPTOSSBridge

    from lora_moe_rl.config.trainer import has_transformer_engine
    from lora_moe_rl.errors import ConfigError
    from lora_moe_rl.trainer import bridge_parts as parts

    class GptOss(parts.Complete, GPTOSSBridge):
        """Upstream's has the rotary embedding of the published models in its code."""

        stack: tuple[str, Any] = ("", None)

        def route(self, provider, config) -> None:
            if has_transformer_engine():
                raise ConfigError(
                    "GPT-OSS is trained on local modules, and Transformer Engine is installed: "
                    "its attention with sinks has not been compared; take it out of the environment"
                )
            rope = config.rope_parameters
            provider.yarn_rotary_scaling_factor = float(rope["factor"])
            provider.yarn_original_max_position_embeddings = rope[
                "original_max_position_embeddings"
            ]
            provider.yarn_beta_fast = float(rope["beta_fast"])
            provider.yarn_beta_slow = float(rope["beta_slow"])
            provider.yarn_correction_range_round_to_int = rope.get("truncate", True)

        def maybe_modify_loaded_hf_weight(self, hf_param, hf_state_dict) -> Any:
            """A stack of experts is read once, not once an expert. `gate_up_proj` [E, H, 2I] is
            turned here: upstream looks at the shape, and leaves a square one as it is."""
            if not isinstance(hf_param, str) or ".mlp.experts." not in hf_param:
                return super().maybe_modify_loaded_hf_weight(hf_param, hf_state_dict)
            if self.stack[0] != hf_param:
                self.stack = ("", None)  # no two in memory
                stack = super().maybe_modify_loaded_hf_weight(hf_param, hf_state_dict)
                if hf_param.endswith("gate_up_proj"):
                    stack = stack.mT.contiguous()
                self.stack = (hf_param, stack)
            return self.stack[1]

    return GptOss


FAMILY = Family(
    architecture="GptOssForCausalLM",
    title="GPT-OSS (GQA with sinks and windows, softmax over the chosen, every layer MoE)",
    model_types=("gpt_oss",),
    attention="gqa",
    refused=refused,
    bridge=bridge,
    qkv_bias=lambda c: True,
    moe_layers=moe.every_layer,
    moe_width="intermediate_size",
    experts="interleaved",
    served_attention="attn",
)
