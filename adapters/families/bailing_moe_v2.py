"""Ling and Ring 2.0. GQA with queries, keys and values in one linear, norms on queries and keys,
rotary embedding on a part of a head; a sigmoid router in groups, and shared experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family

HAS = {
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
LACKS = ("use_bias", "use_qkv_bias", "norm_head", "embedding_dropout", "output_dropout")


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    yield from refusals.sigmoid_router(c)
    for key, has in HAS.items():
        if (value := c.get(key)) != has:
            yield f"{key}={value!r} is not supported: Ling 2.0 has {has!r}, which vLLM reads"
    if not c.get("n_group"):
        yield f"n_group={c.get('n_group')} is not supported: the model's own code has groups alone"
    for key in LACKS:
        if value := c.get(key):
            yield f"{key}={value!r} is not supported: no published model of this family has it"
    if "embedding_dropout" not in c:
        yield "embedding_dropout is missing, which vLLM wants: add it as 0.0"
    width, shared = c["moe_intermediate_size"], c.get("moe_shared_expert_intermediate_size")
    if shared not in (None, width):
        yield (
            f"moe_shared_expert_intermediate_size={shared} is not supported: the model's own code "
            f"makes shared experts as wide as the others, {width}"
        )
    rotated, part = c.get("rotary_dim"), c.get("partial_rotary_factor")
    if None not in (rotated, part) and rotated != c["head_dim"] * part:
        yield f"partial_rotary_factor={part} is not rotary_dim={rotated} of head_dim"
    yield from refusals.quantised(c)
    if layers := c.get("num_nextn_predict_layers"):
        yield (
            f"num_nextn_predict_layers={layers} is not supported: vLLM's class of this family has "
            "no place for the weights of prediction layers; take them out of the checkpoint, and "
            "set it to 0"
        )


def bridge() -> type:
    from megatron.bridge.models.bailing.bailing_moe2_bridge import BailingMoeV2Bridge

    from lora_moe_rl.models import config_types
    from lora_moe_rl.trainer import bridge_parts as parts

    config_types.register()  # in place of upstream's, which does not know one of the two types

    class BailingMoeV2(parts.Complete, BailingMoeV2Bridge):
        def provider_bridge(self, hf_pretrained):
            provider = super().provider_bridge(hf_pretrained)
            provider.rotary_percent = _rotated(hf_pretrained.config.to_dict())
            return provider

    return BailingMoeV2


def _rotated(c: Config) -> float:
    """The part of a head that is rotated: Ling-1T says it by rotary_dim, the others as a factor."""
    if c.get("rotary_dim") is not None:
        return c["rotary_dim"] / c["head_dim"]
    return c.get("partial_rotary_factor", 1.0)


def reference_class() -> Any:
    """The model's own code, of which Megatron-Bridge has a copy."""
    from lora_moe_rl.trainer import bridge

    bridge.load()
    with bridge.quietly():
        from megatron.bridge.models.bailing.modeling_bailing_moe_v2 import BailingMoeV2ForCausalLM
    return BailingMoeV2ForCausalLM


def reference_keys(c: Config) -> dict[str, Any]:
    """Without the kind "default", which transformers 5 has no more, that copy rotates whole heads:
    a linear scaling by 1 is the same, of a part of each."""
    rope = {"rope_type": "linear", "factor": 1.0, "rope_theta": c["rope_theta"]}
    part = {"partial_rotary_factor": _rotated(c)}
    return part | {"rope_scaling": None, "rope_parameters": rope | part}


FAMILY = Family(
    architecture="BailingMoeV2ForCausalLM",
    title="Ling, Ring 2.0 (GQA in one linear, qk-norm, sigmoid router, shared experts)",
    model_types=("bailing_moe_v2", "bailing_moe"),
    attention="fused_gqa",
    refused=refused,
    bridge=bridge,
    qk_norm=lambda c: True,
    names={
        "self_attn": "attention",
        "o_proj": "dense",
        "q_norm": "query_layernorm",
        "k_norm": "key_layernorm",
        "embed_tokens": "word_embeddings",
    },
    served_attention="attention",
    moe_layers=moe.after_the_first,
    router="sigmoid",
    shared_expert="shared_experts",
    shared_width=lambda c: c["moe_intermediate_size"] * (c.get("num_shared_experts") or 0),
    experts="modules",
    reference_class=reference_class,
    reference_keys=reference_keys,
)
