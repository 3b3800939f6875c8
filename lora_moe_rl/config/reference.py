"""The setting of what a policy is measured against, which exists with what measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from lora_moe_rl.config.section import Section

if TYPE_CHECKING:
    from lora_moe_rl.config.schema import RunConfig

Against = Literal["base", "start"]


class ReferenceSettings(Section):
    reference: Against = Field(
        "base",
        description="What the policy is measured against: the base with adapters off, or the "
        "adapter that the run starts from (adapter.init_from), frozen as it was.",
    )


def against_start(config: RunConfig) -> bool:
    """Whether the config's algorithm measures the policy against what it starts from."""
    settings = config.algorithm
    return isinstance(settings, ReferenceSettings) and settings.reference == "start"
