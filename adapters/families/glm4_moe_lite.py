"""GLM-4.7-Flash. The MLA of DeepSeek-V3 with GLM-4.5's sigmoid router and shared experts."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    yield from refusals.interleaved_rope(c)
    yield from refusals.sigmoid_router(c)
    yield from refusals.dense_first(c)


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
    router="sigmoid",
    shared_expert="shared_experts",
    shared_width=moe.shared_experts,
)
