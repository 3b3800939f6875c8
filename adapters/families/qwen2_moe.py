"""Qwen2-MoE and Qwen1.5-MoE. GQA with biases, and a shared expert behind a gate of its own."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    yield from refusals.one_expert(c, c.get("norm_topk_prob"))


def bridge() -> type:
    from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class Qwen2Moe(parts.Complete, Qwen2Bridge):
        """Upstream has none. Qwen2's dense bridge, whose mappings are those of the dense layers,
        with experts."""

        def added(self) -> list:
            return parts.experts() + parts.gated_shared_expert()

        def route(self, provider, config) -> None:
            provider.add_qkv_bias = config.qkv_bias
            provider.moe_router_score_function = "softmax"
            provider.moe_router_pre_softmax = not config.norm_topk_prob
            provider.moe_shared_expert_gate = True

    return Qwen2Moe


FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    title="Qwen2-MoE, Qwen1.5-MoE (GQA with bias, softmax router, gated shared expert)",
    model_types=("qwen2_moe",),
    attention="gqa",
    refused=refused,
    bridge=bridge,
    qkv_bias=lambda c: bool(c.get("qkv_bias", True)),
    moe_layers=moe.sparse_steps,
    shared_expert="shared_expert",
    shared_width=lambda c: c["shared_expert_intermediate_size"],
    shared_gate=True,
    experts="unconverted",
)
