"""Mixtral. GQA; every layer is MoE, under other names than everybody else's."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family

BLOCK, EXPERT_NAMES = "block_sparse_moe", ("w1", "w3", "w2")


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    window = c.get("sliding_window")
    if window and window < c.get("max_position_embeddings", 0):
        yield (
            f"sliding_window={window} is not supported: the trainer attends to all tokens; for "
            f"sequences of at most {window} tokens set max_position_embeddings to {window}"
        )
    yield from refusals.one_expert(c, normalised=True)


def bridge() -> type:
    from megatron.bridge.models.qwen.qwen2_bridge import Qwen2Bridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class Mixtral(parts.Complete, Qwen2Bridge):
        """Upstream has none. Attention and norms have Qwen2's names."""

        def added(self) -> list:
            return parts.experts(BLOCK, EXPERT_NAMES)

        def route(self, provider, config) -> None:
            provider.add_qkv_bias = False
            provider.moe_router_score_function = "softmax"
            provider.moe_router_pre_softmax = False  # softmax over the chosen: they add up to one

    return Mixtral


FAMILY = Family(
    architecture="MixtralForCausalLM",
    title="Mixtral (GQA, softmax router, every layer MoE)",
    model_types=("mixtral",),
    attention="gqa",
    refused=refused,
    bridge=bridge,
    moe_layers=moe.every_layer,
    moe_width="intermediate_size",
    moe_block=BLOCK,
    expert_names=EXPERT_NAMES,
)
