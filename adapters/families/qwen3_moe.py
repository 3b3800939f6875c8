"""Qwen3-MoE. GQA with norms on queries and keys; any layer may be dense."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    yield from refusals.one_expert(c, c.get("norm_topk_prob"))


def bridge() -> type:
    from megatron.bridge.models.qwen.qwen3_moe_bridge import Qwen3MoEBridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class Qwen3Moe(parts.Complete, Qwen3MoEBridge):
        """Upstream's builds every layer as MoE."""

        def added(self) -> list:
            return parts.dense_mlp()

    return Qwen3Moe


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    title="Qwen3-MoE (GQA, qk-norm, softmax router)",
    model_types=("qwen3_moe",),
    attention="gqa",
    refused=refused,
    bridge=bridge,
    qk_norm=lambda c: True,
    moe_layers=moe.sparse_steps,
)
