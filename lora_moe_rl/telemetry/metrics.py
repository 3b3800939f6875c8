"""Metrics of a run: always a line of metrics.jsonl a step, and a tracker when one is chosen."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import TRACKERS
from lora_moe_rl.files.run_dir import RunDir, read_jsonl, to_json


class MetricsWriter:
    """Writes one record a step: a dict with "step" and numbers."""

    def __init__(self, run_dir: RunDir, config: RunConfig):
        self.run_dir, self.config = run_dir, config

    def __enter__(self) -> MetricsWriter:
        # Line buffered: a step that is done is on record, whatever happens next.
        self._file = open(self.run_dir.metrics_file, "a", buffering=1)
        settings = self.config.tracker
        tracker = TRACKERS.find(settings.name)
        self._tracker = tracker(settings, self.config, self.run_dir.path)
        return self

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(to_json(record) + "\n")
        metrics = {key: value for key, value in record.items() if key != "step"}
        self._tracker.write(record["step"], metrics)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        self._tracker.close(failed=error is not None)


def read_metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    """The records so far, one a step; what was NaN is None."""
    return list(read_jsonl(run_dir.metrics_file))
