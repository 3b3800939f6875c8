"""No tracker: metrics.jsonl alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_moe_rl.config import RunConfig, TrackerConfig
from lora_moe_rl.telemetry.trackers.base import Tracker


class NoTracker(Tracker):
    def __init__(self, settings: TrackerConfig, config: RunConfig, run_dir: Path):
        pass

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        pass
