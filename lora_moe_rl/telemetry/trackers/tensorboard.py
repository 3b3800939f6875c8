"""TensorBoard: event files in RUN/tensorboard, for `tensorboard --logdir RUNS`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_moe_rl.config import RunConfig, TrackerConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import METRICS
from lora_moe_rl.telemetry.details import Details
from lora_moe_rl.telemetry.trackers.base import Tracker

FOLDER = "tensorboard"


class TensorBoard(Tracker):
    """Samples and the config become text, distributions histograms."""

    packages = ("tensorboard==2.21.0",)
    modules = ("tensorboard",)

    def __init__(self, settings: TrackerConfig, config: RunConfig, run_dir: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise self.missing(error) from error
        done = max((one["step"] for one in read_jsonl(run_dir / METRICS)), default=-1)
        # What an earlier life has written of steps that this one makes again is not shown.
        purge = done + 1 if (run_dir / FOLDER).exists() else None
        self._writer = SummaryWriter(str(run_dir / FOLDER), purge_step=purge)
        self._writer.add_text("config", _code(to_yaml(config)), max(done, 0))

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()  # a step that is done can be seen

    def details(self, step: int, details: Details) -> None:
        for name, values in details.histograms.items():
            self._writer.add_histogram(name, values, step)
        for place, sample in enumerate(details.samples):
            lines = [f"{key}: {value}" for key, value in sample.items()]
            self._writer.add_text(f"samples/{place}", _code("\n".join(lines)), step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


def _code(text: str) -> str:
    """The text as a block of Markdown that shows it as it is."""
    return "".join(f"    {line}\n" for line in text.splitlines())
