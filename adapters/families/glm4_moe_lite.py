"""GLM-4.7-Flash. The MLA of DeepSeek-V3 with GLM-4.5's sigmoid router and shared experts."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    yield from refusals.interleaved_rope(c)
    yield from refusals.sigmoid_router(c)
    first, layers = c.get("first_k_dense_replace"), c["num_hidden_layers"]
    if first is None:
        yield "first_k_dense_replace is missing: vLLM fails to load the model without it"
        return
    # transformers goes by mlp_layer_types, vLLM and Megatron-Bridge by first_k_dense_replace.
    kinds = c.get("mlp_layer_types") or ["dense"] + ["sparse"] * (layers - 1)
    if list(kinds) != ["dense"] * first + ["sparse"] * (layers - first):
        yield f"first_k_dense_replace={first!r} and mlp_layer_types differ in what is dense"
    if (freq := c.get("moe_layer_freq", 1)) != 1:
        yield f"moe_layer_freq={freq!r} is not supported: transformers knows no such key"


def bridge() -> type:
    from megatron.bridge.models.glm.glm47_flash_bridge import GLM47FlashBridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class Glm4MoeLite(parts.Complete, GLM47FlashBridge):
        pass

    return Glm4MoeLite


FAMILY = Family(
    architecture="Glm4MoeLiteForCausalLM",
    title="GLM-4.7-Flash (MLA, sigmoid router, shared experts)",
    model_types=("glm4_moe_lite",),
    attention="mla",
    refused=refused,
    bridge=bridge,
    moe_layers=moe.after_the_first,
    sigmoid_router=True,
    shared_expert="shared_experts",
    shared_width=moe.shared_experts,
)
