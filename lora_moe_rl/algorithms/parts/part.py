"""What an algorithm is put together from: each part is one file with settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lora_moe_rl.algorithms.base import Reduce
from lora_moe_rl.config.plugins import Plugin
from lora_moe_rl.config.section import Section

# exp of more than this says nothing any more, and soon is inf. (verl's and OpenRLHF's value.)
LOG_BOUND = 20.0


class Part(Plugin):
    """`settings` are those of the algorithm, which has those of the part among them. `metrics` are
    reported as the algorithm's own."""

    Settings: ClassVar[type[Section]] = Section
    metrics: Mapping[str, Reduce] = {}

    def __init__(self, settings: Any):
        self.settings = settings


def check_bounds(kind: str, low: float | None, high: float) -> None:
    """Raises ValueError for bounds of a ratio, algorithm.<kind>_min and algorithm.<kind>_max, that
    are in the wrong order or leave out 1, which is the ratio of two policies that agree."""
    absolute = "bounds are absolute ratios of trainer to engine (1.2, and not 0.2)"
    if low is not None and low >= high:
        raise ValueError(
            f"algorithm.{kind}_min={low:g} is not below {kind}_max={high:g}; {absolute}"
        )
    for end, value, beyond in (("min", low or 1.0, "above"), ("max", high, "below")):
        if value > 1 if beyond == "above" else value < 1:
            raise ValueError(
                f"algorithm.{kind}_{end}={value:g} is {beyond} 1, which is the ratio of two "
                f"policies that agree; {absolute}"
            )
