"""ERNIE 4.5. GQA whose rotary embedding turns neighbours; a softmax router with a correction bias,
under keys of its own."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Config, Family

NORM_MIN = 1e-12  # what the weights of the chosen experts are divided by at least


def refused(c: Config) -> Iterator[str]:
    if "tie_word_embeddings" not in c:
        yield from refusals.tied(c, unsaid=True)  # as transformers takes it
    yield from refusals.usual(c)
    if c.get("use_bias"):
        yield "use_bias=true is not supported: Megatron-Bridge has no place for biases"
    if c.get("moe_k") == 1:
        yield "moe_k=1 is not supported: every score would be 1"
    if (least := c.get("moe_norm_min", NORM_MIN)) != NORM_MIN:
        yield f"moe_norm_min={least} is not supported: vLLM and the trainer read no such key"
    for key, has in (("moe_gate_act", "softmax"), ("moe_use_aux_free", True), ("use_moe", True)):
        if (value := c.get(key, has)) != has:
            yield f"{key}={value!r} is not supported: ERNIE 4.5 has {has!r}, whatever it says"


def moe_layers(c: Config) -> tuple[int, ...]:
    first, last = c.get("moe_layer_start_index", 1), c.get("moe_layer_end_index", -1)
    last, every = c["num_hidden_layers"] if last == -1 else last, c.get("moe_layer_interval", 1)
    return tuple(i for i in moe.every_layer(c) if first <= i <= last and (i + 1) % every == 0)


def bridge() -> type:
    from megatron.bridge.models.ernie.ernie_45_bridge import Ernie45Bridge

    from lora_moe_rl.trainer import bridge_parts as parts

    class Ernie45(parts.Complete, Ernie45Bridge):
        """Upstream has sigmoids and 500,000 in the code. The softmax: `corrected_softmax.py`."""

        def provider_bridge(self, hf_pretrained):
            provider = super().provider_bridge(hf_pretrained)
            provider.rotary_base = hf_pretrained.config.rope_parameters["rope_theta"]
            return provider

    return Ernie45


FAMILY = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    title="ERNIE 4.5 (GQA, softmax router with a correction, shared experts)",
    model_types=("ernie4_5_moe",),
    attention="gqa",
    refused=refused,
    bridge=bridge,
    moe_layers=moe_layers,
    num_experts=("moe_num_experts",),
    top_k="moe_k",
    router="corrected_softmax",
    shared_expert="shared_experts",
    shared_width=lambda c: c["moe_intermediate_size"] * c["moe_num_shared_experts"],
)
