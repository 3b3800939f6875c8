"""What an algorithm is put together from: each part is one file with settings of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lora_moe_rl.algorithms.base import Reduce
from lora_moe_rl.config.plugins import Plugin
from lora_moe_rl.config.section import Section


class Part(Plugin):
    """`settings` are those of the algorithm, which has those of the part among them. `metrics` are
    reported as the algorithm's own."""

    Settings: ClassVar[type[Section]] = Section
    metrics: Mapping[str, Reduce] = {}

    def __init__(self, settings: Any):
        self.settings = settings
