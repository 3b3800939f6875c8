"""Which layers have gated DeltaNet, as config.json has it, and what is refused of it."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe
from lora_moe_rl.adapters.families.common.family import Config


def linear_layers(c: Config) -> tuple[int, ...]:
    kinds = c.get("layer_types")
    if not kinds:  # as published
        every = c.get("full_attention_interval", 4)
        return tuple(i for i in moe.every_layer(c) if (i + 1) % every)
    return tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")


def refused(c: Config) -> Iterator[str]:
    if strange := sorted(set(c.get("layer_types") or ()) - {"linear_attention", "full_attention"}):
        yield f"layer_types has {', '.join(strange)}: only linear_attention and full_attention are"
    if (kinds := c.get("layer_types")) and len(kinds) != c["num_hidden_layers"]:
        yield f"layer_types has {len(kinds)} entries for {c['num_hidden_layers']} layers"
    if c.get("layer_scale"):
        yield "layer_scale=true is not supported: transformers and Megatron-core have no such scale"
    if c.get("attn_output_gate") is False:
        yield "attn_output_gate=false is not supported: transformers has the gate always"
    if c["linear_num_value_heads"] % c["linear_num_key_heads"]:
        yield (
            f"linear_num_value_heads={c['linear_num_value_heads']} is no multiple of "
            f"linear_num_key_heads={c['linear_num_key_heads']}"
        )
    if not c.get("shared_expert_intermediate_size"):
        yield "shared_expert_intermediate_size=0 is not supported: Megatron-Bridge wants the expert"
