"""Qwen3.5-MoE, its language model by itself. As Qwen3-Next, but that every layer has experts, and
that gated DeltaNet has linears of its own for queries, keys and values, for gates, for betas and
for decays.

Rotary embeddings have three positions a token (`mrope_section`), of which those of text are equal:
what is computed is one embedding.
"""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import delta, moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family

ROPE_KEYS = ("mrope_section", "mrope_interleaved")


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c, rope_keys=ROPE_KEYS)
    yield from refusals.one_expert(c, normalised=True)
    yield from delta.refused(c)
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if rope.get("mrope_section") and not rope.get("mrope_interleaved"):
        yield (
            "mrope_interleaved=false is not supported: nobody has compared sections in a row with "
            "one position of text"
        )
    if c.get("norm_topk_prob") is False:
        yield "norm_topk_prob=false is not supported: transformers and vLLM divide the scores"
    if c.get("mlp_only_layers") or c.get("decoder_sparse_step", 1) != 1:
        yield (
            f"mlp_only_layers={c.get('mlp_only_layers')} with decoder_sparse_step="
            f"{c.get('decoder_sparse_step', 1)} is not supported: every layer of transformers' "
            "model has experts"
        )


def bridge() -> type:
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.utils import moe_experts_stored_packed
    from megatron.bridge.models.qwen.qwen35_bridge import Qwen35MoEBridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class OfEither(Qwen35MoEBridge):
        """Of the model by itself, or inside the published one. Upstream's mappings are of one name
        of the weights, and of prediction layers too."""

        def mapping_registry(self) -> MegatronMappingRegistry:
            source = getattr(self, "hf_pretrained", None)
            prefix = parts.prefix_of(source)
            packed = moe_experts_stored_packed(source, f"{prefix}layers.")
            return MegatronMappingRegistry(
                *self._get_moe_lm_mappings(hf_prefix=prefix, experts_packed=packed)
            )

    class Qwen35MoE(parts.Complete, OfEither):
        def route(self, provider, config) -> None:
            provider.moe_router_score_function = "softmax"
            provider.moe_router_pre_softmax = False

    return Qwen35MoE


FAMILY = Family(
    architecture="Qwen3_5MoeForCausalLM",
    title="Qwen3.5-MoE by itself (gated DeltaNet and gated GQA, gated shared expert)",
    model_types=("qwen3_5_moe_text",),
    attention="gated_gqa",
    linear_layers=delta.linear_layers,
    linear_attention="separate_delta",
    refused=refused,
    bridge=bridge,
    qk_norm=lambda c: True,
    moe_layers=moe.every_layer,
    shared_expert="shared_expert",
    shared_width=lambda c: c["shared_expert_intermediate_size"],
    shared_gate=True,
    experts="unconverted",
)
