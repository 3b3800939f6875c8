"""Configs of model types that transformers knows only by code that comes with a model."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


class BailingMoeV2Config(PreTrainedConfig):
    """Ling 2.0: what its config.json says. That there is `rope_parameters` has transformers make
    it of the older keys."""

    model_type = "bailing_moe_v2"
    rope_parameters: Any = None


class BailingMoeConfig(BailingMoeV2Config):
    model_type = "bailing_moe"


def register() -> None:
    """Makes transformers find them, as vLLM and Megatron-Bridge ask it to."""
    for one in (BailingMoeV2Config, BailingMoeConfig):
        AutoConfig.register(one.model_type, one, exist_ok=True)
