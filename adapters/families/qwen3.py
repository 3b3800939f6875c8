"""Qwen3, dense. GQA with norms on queries and keys."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import refusals
from lora_moe_rl.adapters.families.common.family import Config, Family


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)


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
    refused=refused,
    bridge=bridge,
    qk_norm=lambda c: True,
)
