"""Hunyuan 3 (Hy3). GQA with norms on queries and keys, a sigmoid router with a correction bias, and
shared experts."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family

# Keys that vLLM reads where the others compute as they have it, or that nobody reads.
ALWAYS = ("qk_norm", "route_norm", "moe_router_use_sigmoid", "moe_router_enable_expert_bias")
WIDTH = 1536  # what vLLM and transformers take experts to be where their key is missing


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c)
    yield from refusals.sigmoid_router(c)
    yield from refusals.dense_first(c)
    for key in ALWAYS:
        if not c.get(key, True):
            yield f"{key}=false is not supported: trainer and transformers compute as if it were"
    width, other = c["moe_intermediate_size"], c.get("expert_hidden_dim", WIDTH)
    if width != other:
        yield (
            f"moe_intermediate_size={width} and expert_hidden_dim={other} differ: transformers and "
            "the trainer read the first, vLLM the second"
        )
    if c.get("router_scaling_factor") is None:
        yield "router_scaling_factor is missing: vLLM takes none then, transformers 2.826"
    if not c.get("num_shared_experts"):
        yield "num_shared_experts=0 is not supported: transformers has a shared expert always"


def bridge() -> type:
    from megatron.bridge.models.hy_v3.hy_v3_bridge import HYV3Bridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class HyV3(parts.Complete, HYV3Bridge):
        pass

    return HyV3


FAMILY = Family(
    architecture="HYV3ForCausalLM",
    title="Hunyuan 3 (GQA, qk-norm, sigmoid router, shared experts)",
    model_types=("hy_v3",),
    attention="gqa",
    refused=refused,
    bridge=bridge,
    qk_norm=lambda c: True,
    moe_layers=moe.after_the_first,
    router="sigmoid",
    shared_expert="shared_mlp",
    shared_in_transformers="shared_experts",
    shared_width=lambda c: c["moe_intermediate_size"] * c["num_shared_experts"],
    experts="unconverted",
)
