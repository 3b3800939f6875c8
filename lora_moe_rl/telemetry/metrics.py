"""Metrics of a run: always a line of metrics.jsonl a step, and one an evaluation; and the trackers
that are chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.plugins import TRACKERS
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import RunDir
from lora_moe_rl.telemetry import console, names
from lora_moe_rl.telemetry.details import Details
from lora_moe_rl.telemetry.metric_table import Checked
from lora_moe_rl.telemetry.trackers.base import Tracker

log = logging.getLogger(__name__)


class MetricsWriter:
    """Writes one record a step or evaluation: a dict with "step" and numbers, each of which stands
    in the table of metrics. A tracker that raises while the run goes on is left out from then on,
    with a warning: the run is worth more, and metrics.jsonl has everything."""

    def __init__(self, run_dir: RunDir, config: RunConfig):
        self.run_dir, self.config = run_dir, config
        self._checked = Checked(config)
        self._trackers: list[Tracker] = []

    def __enter__(self) -> MetricsWriter:
        settings = self.config.tracker
        file = self.run_dir.metrics_file
        there = read_jsonl(file) if file.exists() else ()
        self._newest = max((one["step"] for one in there), default=0)
        try:
            for tracker in TRACKERS.chosen(settings.name):
                self._trackers.append(tracker(settings, self.config, self.run_dir.path))
        except BaseException:
            self._close(failed=True)
            raise
        return self

    def write(self, record: dict[str, Any]) -> None:
        """Raises ValueError for a metric that is not in the table, and then writes nothing."""
        metrics = {key: value for key, value in record.items() if key != "step"}
        self._checked.check(metrics)
        self.run_dir.append(self.run_dir.metrics_file, [record])
        # Trackers go on only: an evaluation beside training ends some steps after its own.
        newest = self._newest = max(self._newest, record["step"])
        self._tell(lambda tracker: tracker.write(newest, metrics))

    def details(self, step: int, details: Details) -> None:
        """Of a step whose record was written."""
        self._checked.check(details.histograms)
        self._tell(lambda tracker: tracker.details(step, details))

    def adapter(self, step: int, directory: Path) -> None:
        """The adapter, a PEFT directory, as the step left it."""
        self._tell(lambda tracker: tracker.adapter(step, directory))

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                what(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                log.exception("%s failed", type(tracker).__name__)
                console.warn(
                    f"the tracker {type(tracker).__name__} failed and is left out from now on: "
                    f"{error}. {self.run_dir.metrics_file} has all metrics"
                )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(failed=error is not None)

    def _close(self, failed: bool) -> None:
        self._tell(lambda tracker: tracker.close(failed))


def read_metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    """The records of a run so far, one a step."""
    return read_steps(run_dir.metrics_file)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, one a step; what was NaN is None."""
    return [record for record in read_jsonl(path) if names.EVAL_STEP not in record]


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Those of evaluations, in the order of their steps."""
    found = [record for record in read_jsonl(path) if names.EVAL_STEP in record]
    return sorted(found, key=lambda record: record["step"])
