"""Qwen3.5-MoE as it is published: the language model in one of text and images. Trained and served
is the language model alone, on text; the weights of the vision tower are left where they are."""

from __future__ import annotations

from dataclasses import replace

from lora_moe_rl.adapters.families import qwen3_5_moe
from lora_moe_rl.adapters.families.common.family import Inside

FAMILY = replace(
    qwen3_5_moe.FAMILY,
    architecture="Qwen3_5MoeForConditionalGeneration",
    title="Qwen3.5-MoE (its text alone: no images)",
    model_types=("qwen3_5_moe",),
    stacked_files=True,
    inside=Inside(
        architecture=qwen3_5_moe.FAMILY.architecture,
        model_type=qwen3_5_moe.FAMILY.model_types[0],
        key="text_config",
        prefix="model.language_model.",
        left_out=("model.visual.",),
    ),
)
