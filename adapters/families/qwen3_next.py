"""Qwen3-Next. Gated DeltaNet in three of four layers, GQA behind an output gate in the others; a
softmax router, and a shared expert behind a gate of its own."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import delta, moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    yield from refusals.one_expert(c, c.get("norm_topk_prob", True))
    yield from delta.refused(c)


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
    linear_layers=delta.linear_layers,
    refused=refused,
    bridge=bridge,
    qk_norm=lambda c: True,
    moe_layers=moe.sparse_steps,
    shared_expert="shared_expert",
    shared_width=lambda c: c["shared_expert_intermediate_size"],
    shared_gate=True,
)
