"""DeepSeek-V3, Moonlight and Kimi-K2, and the language model of Kimi-K2.5. MLA and a sigmoid router
with a correction bias."""

from __future__ import annotations

from collections.abc import Iterator

from lora_moe_rl.adapters.families.common import moe, refusals
from lora_moe_rl.adapters.families.common.family import Around, Config, Family

# Configs written by transformers lack both keys; vLLM then fails to load the model.
SCORING = ((None, None), ("sigmoid", "noaux_tc"))


def refused(c: Config) -> Iterator[str]:
    yield from refusals.usual(c, refusals.MLA_ROPES)
    yield from refusals.interleaved_rope(c)
    yield from refusals.sigmoid_router(c)
    yield from refusals.scoring(c, SCORING, "DeepSeek-V3 has sigmoid with noaux_tc")


def bridge() -> type:
    from megatron.bridge.models.deepseek.deepseek_v3_bridge import DeepSeekV3Bridge
    from transformers import AutoConfig, DeepseekV3Config

    from lora_moe_rl.trainer import bridge_parts as parts

    class DeepseekV3(parts.Complete, DeepSeekV3Bridge):
        pass

    class KimiK2Config(DeepseekV3Config):
        """A model_type that transformers knows only by remote code."""

        model_type = "kimi_k2"

    AutoConfig.register("kimi_k2", KimiK2Config, exist_ok=True)
    return DeepseekV3


FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    title="DeepSeek-V3, Moonlight, Kimi-K2 (MLA, sigmoid router, shared experts)",
    model_types=("deepseek_v3", "kimi_k2"),
    attention="mla",
    refused=refused,
    bridge=bridge,
    moe_layers=moe.after_the_first,
    router="sigmoid",
    shared_expert="shared_experts",
    shared_width=moe.shared_experts,
    around=(
        Around(
            architecture="KimiK25ForConditionalGeneration",
            key="text_config",
            prefix="language_model.",
            left_out=("vision_tower.", "mm_projector."),
        ),
    ),
)
