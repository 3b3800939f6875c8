"""What a tracker is: it takes one record of metrics a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from lora_moe_rl.config import RunConfig, TrackerConfig
from lora_moe_rl.config.plugins import Plugin


class Tracker(Plugin):
    """Base of all trackers. One is made when the run starts, and again when it is resumed.

    `config` is the run's, `settings` its section `tracker`, `run_dir` where the run writes. Raises
    ConfigError, before anything slow starts, for what a user can get wrong.
    """

    Settings: ClassVar[type[TrackerConfig]] = TrackerConfig

    def __init__(self, settings: TrackerConfig, config: RunConfig, run_dir: Path):
        raise NotImplementedError

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes the numbers of one step; NaN and infinity may be among them."""
        raise NotImplementedError

    def close(self, failed: bool) -> None:
        """Told when the run is over; `failed` is True when an error ended it."""
