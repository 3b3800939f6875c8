"""MiniMax-M2. GQA with norms over all heads, rotary embedding on a part of a head; every layer is
MoE, under Mixtral's names, with a sigmoid router and a correction bias."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family

BLOCK, EXPERT_NAMES = "block_sparse_moe", ("w1", "w3", "w2")


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    yield from refusals.sigmoid_router(c)
    for key, has in (("scoring_func", "sigmoid"), ("use_routing_bias", True)):
        if (value := c.get(key)) != has:
            yield f"{key}={value!r} is not supported: MiniMax-M2 has {has!r}, which vLLM reads"
    for key, has in (("use_qk_norm", True), ("qk_norm_type", "per_layer")):
        if (value := c.get(key, has)) != has:
            yield f"{key}={value!r} is not supported: MiniMax-M2 has {has!r}"
    for key in ("shared_intermediate_size", "sliding_window"):
        if c.get(key):
            yield f"{key}={c[key]} is not supported: no published model of this family has it"
    if set(c.get("attn_type_list") or ()) - {1}:
        yield "attn_type_list has others than 1: linear attention is not supported"
    factors = (
        c.get("partial_rotary_factor"),
        (c.get("rope_parameters") or {}).get("partial_rotary_factor"),
    )
    for factor in factors:
        if factor is not None and factor * c["head_dim"] != c["rotary_dim"]:
            yield f"partial_rotary_factor={factor} is not rotary_dim={c['rotary_dim']} of head_dim"
    yield from refusals.quantised(c)


def bridge() -> type:
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class MiniMaxM2(parts.Complete, Qwen3Bridge):
        """Attention has the names of Qwen3. Upstream's own bridge loads its norms on GPUs alone,
        and they have the wrong gradient (`trainer/norm_over_heads.py`)."""

        def added(self) -> list:
            return parts.experts(BLOCK, EXPERT_NAMES, bias="e_score_correction_bias")

        def route(self, provider, config) -> None:
            provider.moe_router_score_function = "sigmoid"
            provider.moe_router_enable_expert_bias = True
            provider.moe_router_pre_softmax = False

        def provider_bridge(self, hf_pretrained):
            provider = super().provider_bridge(hf_pretrained)
            provider.rotary_percent = hf_pretrained.config.rotary_dim / provider.kv_channels
            return provider

    return MiniMaxM2


def reference_keys(c: Config) -> dict[str, float]:
    """transformers 5.12.1 does not read `rotary_dim`, and would rotate whole heads."""
    return {"partial_rotary_factor": c["rotary_dim"] / c["head_dim"]}


FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    title="MiniMax-M2 (GQA, qk-norm over all heads, sigmoid router, every layer MoE)",
    model_types=("minimax_m2",),
    attention="gqa",
    refused=refused,
    bridge=bridge,
    qk_norm=lambda c: True,
    norm_over_heads=True,
    moe_layers=moe.every_layer,
    moe_width="intermediate_size",
    moe_block=BLOCK,
    expert_names=EXPERT_NAMES,
    router="sigmoid",
    reference_keys=reference_keys,
)
