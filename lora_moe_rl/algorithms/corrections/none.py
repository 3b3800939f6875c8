"""No correction: engine and trainer are taken for one policy."""

from __future__ import annotations

from lora_moe_rl.algorithms.corrections.base import Correction
from lora_moe_rl.config.section import Section


class NoCorrection(Correction):
    Settings = Section
    corrects = False
    metrics = {}
