"""The section `placement`: whether trainer and engines stand on the same devices."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lora_moe_rl.config.section import Section


class PlacementConfig(Section):
    mode: Literal["split", "colocated"] = Field(
        "split",
        description="Trainer and engines have devices of their own (split), or take turns on the "
        "same ones (colocated): engines give memory back while the trainer updates.",
    )
    gives_back: Literal["cache", "weights"] = Field(
        "cache",
        description="What engines give back while the trainer updates: the cache of keys and "
        "values (cache), or the base's weights and the adapter slots too, which wait in the host's "
        "memory (weights, on GPUs).",
    )

    @property
    def colocated(self) -> bool:
        return self.mode == "colocated"
