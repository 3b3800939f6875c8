"""Whether responses are as short as those of the tiny models."""

from __future__ import annotations

from lora_moe_rl.adapters.spec import ModelShape
from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.section import is_set

TINY = 1024  # the hidden size of what nobody trains to learn from it


def check(config: RunConfig, shape: ModelShape) -> str:
    """A warning of lengths that are the defaults, which fit the demo, with a model of a usual size;
    '' for others."""
    if config.offline or shape.hidden_size < TINY or is_set(config.rollout, "max_response_tokens"):
        return ""
    return (
        f"rollout.max_response_tokens={config.rollout.max_response_tokens}, the default, is the "
        f"length of the tiny models' answers: responses end there; set it, and model.max_length="
        f"{config.model.max_length} to what prompt and response take together"
    )
