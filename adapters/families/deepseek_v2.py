"""DeepSeek-V2 and V2-Lite. MLA; the router scores a group of experts by its best one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family

SCORING = tuple(product((None, "softmax"), (None, "greedy", "group_limited_greedy")))


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c, refusals.MLA_ROPES)
    if c.get("norm_topk_prob"):
        yield "norm_topk_prob=true is not supported: transformers ignores it, vLLM does not"
    has = "DeepSeek-V2 has softmax with greedy or group_limited_greedy"
    yield from refusals.scoring(c, SCORING, has)


def bridge() -> type:
    from megatron.bridge.models.deepseek.deepseek_v2_bridge import DeepSeekV2Bridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class DeepseekV2(parts.Complete, DeepSeekV2Bridge):
        group_members = 1

        def route(self, provider, config) -> None:
            if config.topk_method == "greedy":  # upstream's then limits it to groups all the same
                provider.moe_router_num_groups = provider.moe_router_group_topk = None

    return DeepseekV2


def mend_reference(layer: Any, config: Any) -> None:
    """transformers 5.12.1 (`modeling_deepseek_v2.py`): the group-limited router asks for
    `num_experts`, which is not set, and the attention leaves out YaRN's `mscale_all_dim`, which
    DeepSeek's own code and vLLM apply (`DeepseekV3Attention` has it)."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    if hasattr(layer.mlp, "gate"):
        if hasattr(layer.mlp, "num_experts"):
            raise RuntimeError("transformers' DeepseekV2Moe has num_experts now: check this mend")
        layer.mlp.num_experts = config.n_routed_experts
    plain = layer.self_attn.qk_head_dim**-0.5
    if layer.self_attn.scaling != plain:
        raise RuntimeError(
            "transformers' DeepseekV2Attention scales by itself now: check this mend"
        )
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn" and (all_dim := rope.get("mscale_all_dim")):
        layer.self_attn.scaling = plain * yarn_get_mscale(rope["factor"], all_dim) ** 2


FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    title="DeepSeek-V2 (MLA, softmax router, shared experts)",
    model_types=("deepseek_v2",),
    attention="mla",
    refused=refused,
    bridge=bridge,
    moe_layers=moe.after_the_first,
    shared_expert="shared_experts",
    shared_width=moe.shared_experts,
    mend_reference=mend_reference,
)
