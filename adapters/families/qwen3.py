"""Qwen3, dense. GQA with norms on queries and keys."""

from __future__ import annotations

from lora_moe_rl.adapters.families.common import refusals
from lora_moe_rl.adapters.families.common.family import Family


def bridge() -> type:
    from megatron.bridge.models.qwen.qwen3_bridge import Qwen3Bridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class Qwen3(parts.Complete, Qwen3Bridge):
        pass

    return Qwen3


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    title="Qwen3, dense (GQA, qk-norm)",
    model_types=("qwen3",),
    attention="gqa",
    refused=refusals.usual,
    bridge=bridge,
    qk_norm=lambda c: True,
)
