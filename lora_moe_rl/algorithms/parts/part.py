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
