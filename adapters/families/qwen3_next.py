"""Qwen3-Next. Gated DeltaNet in three of four layers, GQA behind an output gate in the others; a
softmax router, and a shared expert behind a gate of its own."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family


def linear_layers(c: Config) -> tuple[int, ...]:
    kinds = c.get("layer_types")
    if not kinds:  # as published
        every = c.get("full_attention_interval", 4)
        return tuple(i for i in moe.every_layer(c) if (i + 1) % every)
    return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    yield from refusals.one_expert(c, c.get("norm_topk_prob", True))
    if strange := sorted(set(c.get("layer_types") or ()) - {"linear_attention", "full_attention"}):
        yield f"layer_types has {', '.join(strange)}: only linear_attention and full_attention are"
    if (kinds := c.get("layer_types")) and len(kinds) != c["num_hidden_layers"]:
        yield f"layer_types has {len(kinds)} entries for {c['num_hidden_layers']} layers"
    if c.get("layer_scale"):
        yield "layer_scale=true is not supported: transformers and Megatron-core have no such scale"
    if c["linear_num_value_heads"] % c["linear_num_key_heads"]:
        yield (
            f"linear_num_value_heads={c['linear_num_value_heads']} is no multiple of "
            f"linear_num_key_heads={c['linear_num_key_heads']}"
        )
    if not c.get("shared_expert_intermediate_size"):
        yield "shared_expert_intermediate_size=0 is not supported: Megatron-Bridge wants the expert"


def bridge() -> type:
    from megatron.bridge.models.qwen.qwen3_next_bridge import Qwen3NextBridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class Qwen3Next(parts.Complete, Qwen3NextBridge):
        """Upstream's builds every layer as MoE."""

        def added(self) -> list:
            return parts.dense_mlp()

        def route(self, provider, config) -> None:
            provider.moe_router_score_function = "softmax"
            provider.moe_router_pre_softmax = not config.norm_topk_prob

    return Qwen3Next


FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    title="Qwen3-Next (gated DeltaNet and gated GQA, softmax router, gated shared expert)",
    model_types=("qwen3_next",),
    attention="gated_gqa",
    linear_layers=linear_layers,
    refused=refused,
    bridge=bridge,
    qk_norm=lambda c: True,
    moe_layers=moe.sparse_steps,
    shared_expert="shared_expert",
    shared_width=lambda c: c["shared_expert_intermediate_size"],
    shared_gate=True,
)
