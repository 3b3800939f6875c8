"""Qwen3.5-MoE as it is published: the language model in one of text and images. Trained and served
is the language model alone, on text; the weights of the vision tower are left where they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lora_moe_rl.adapters.families import qwen3_5_moe
from lora_moe_rl.adapters.families.common.family import Config, Inside


def refused(c: Config) -> Iterator[str]:
    yield from qwen3_5_moe.refused(c)
    if c.get("quantization_config"):
        yield "text_config has a quantization_config: take a checkpoint that is not quantised"


FAMILY = replace(
    qwen3_5_moe.FAMILY,
    architecture="Qwen3_5MoeForConditionalGeneration",
    title="Qwen3.5-MoE (its text alone: no images)",
    model_types=("qwen3_5_moe",),
    refused=refused,
    experts="stacked",
    inside=Inside(
        architecture=qwen3_5_moe.FAMILY.architecture,
        model_type=qwen3_5_moe.FAMILY.model_types[0],
        key="text_config",
        prefix="model.language_model.",
        left_out=("model.visual.",),
    ),
)
