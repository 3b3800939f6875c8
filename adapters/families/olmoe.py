"""OLMoE. MHA or GQA with norms over all heads of queries and of keys; every layer is MoE."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family

EPS = 1e-5  # vLLM's, whatever config.json says


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    if (clip := c.get("clip_qkv")) is not None:
        yield f"clip_qkv={clip} is not supported: trainer and engine do not clip; use null"
    if c.get("norm_topk_prob"):
        yield "norm_topk_prob=true is not supported: vLLM ignores it"
    if (eps := c.get("rms_norm_eps", EPS)) != EPS:
        yield f"rms_norm_eps={eps} is not supported: vLLM takes {EPS} whatever it is"
    if (head := c.get("head_dim")) and head * c["num_attention_heads"] != c["hidden_size"]:
        yield f"head_dim={head} is not supported: vLLM takes hidden_size / num_attention_heads"


def bridge() -> type:
    from megatron.bridge.models.olmoe.olmoe_bridge import OlMoEBridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class Olmoe(parts.Complete, OlMoEBridge):
        """The norms that upstream's provider brings are not used (`trainer/norm_over_heads.py`)."""

    return Olmoe


FAMILY = Family(
    architecture="OlmoeForCausalLM",
    title="OLMoE (MHA or GQA, qk-norm over all heads, softmax router, every layer MoE)",
    model_types=("olmoe",),
    attention="gqa",
    refused=refused,
    bridge=bridge,
    qk_norm=lambda c: True,
    norm_over_heads=True,
    repeats_keys=False,
    moe_layers=moe.every_layer,
    moe_width="intermediate_size",
)
