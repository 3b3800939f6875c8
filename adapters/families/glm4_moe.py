"""GLM-4.5. GQA, some members with biases and norms on queries and keys; a sigmoid router."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c, attention_bias=True)
    yield from refusals.sigmoid_router(c)


def bridge() -> type:
    from megatron.bridge.models.glm.glm45_bridge import GLM45Bridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class Glm4Moe(parts.Complete, GLM45Bridge):
        pass

    return Glm4Moe


FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    title="GLM-4.5 (GQA, sigmoid router, shared experts)",
    model_types=("glm4_moe",),
    attention="gqa",
    refused=refused,
    bridge=bridge,
    qkv_bias=lambda c: bool(c.get("attention_bias")),
    qk_norm=lambda c: bool(c.get("use_qk_norm")),
    moe_layers=moe.after_the_first,
    router="sigmoid",
    shared_expert="shared_experts",
    shared_width=moe.shared_experts,
)
