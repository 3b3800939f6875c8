"""Metrics of a run: always a line of metrics.jsonl a step, and one an evaluation; and the trackers
that are chosen."""

from __future__ import annotations

import shutil
import time
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
from lora_moe_rl.telemetry.tracker_thread import TrackerThread

FOLDER = "tracking"  # of the run directory: adapters on their way to trackers
AT_ONCE_S = 5.0  # for trackers, of a run that is ended at once


class MetricsWriter:
    """Writes one record a step or evaluation: a dict with "step" and numbers, each of which stands
    in the table of metrics. Trackers have it in threads of their own; one that raises while the run
    goes on is left out from then on, with a warning: the run is worth more, and metrics.jsonl has
    everything."""

    def __init__(self, run_dir: RunDir, config: RunConfig):
        self.run_dir, self.config = run_dir, config
        self._checked = Checked(config)
        self._trackers: list[TrackerThread] = []

    def __enter__(self) -> MetricsWriter:
        settings = self.config.tracker
        file = self.run_dir.metrics_file
        folder = self.run_dir.path / FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        try:
            for kind in TRACKERS.chosen(settings.name):
                tracker = kind(settings, self.config, self.run_dir.path)
                parts = (folder / kind.__name__, console.warn, file)
                self._trackers.append(TrackerThread(tracker, *parts))
        except BaseException as error:
            self._close(error)
            raise
        return self

    def write(self, record: dict[str, Any]) -> None:
        """Raises ValueError for a metric that is not in the table, and then writes nothing."""
        metrics = {key: value for key, value in record.items() if key != "step"}
        self._checked.check(metrics)
        self.run_dir.append(self.run_dir.metrics_file, [record])
        for tracker in self._trackers:
            tracker.write(record["step"], metrics)

    def details(self, step: int, details: Details) -> None:
        """Hands on the details of a step whose record was written."""
        self._checked.check(details.histograms)
        for tracker in self._trackers:
            tracker.details(step, details)

    def adapter(self, step: int, directory: Path) -> None:
        """The adapter, a PEFT directory, as the step left it. It may be another one once this
        returns."""
        for tracker in self._trackers:
            tracker.adapter(step, directory)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """Waits for trackers, for all of them together no longer than is allowed."""
        at_once = error is not None and not isinstance(error, Exception)
        seconds = AT_ONCE_S if at_once else self.config.tracker.end_timeout_s
        for tracker in self._trackers:
            tracker.close(failed=error is not None)
        deadline = time.monotonic() + seconds
        for tracker in self._trackers:
            tracker.wait(deadline)
        shutil.rmtree(self.run_dir.path / FOLDER, ignore_errors=True)


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
