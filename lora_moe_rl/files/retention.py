"""Which checkpoints stay beside the newest: by age, and the best by a metric. Files are looked at,
and nothing is removed here.

An age is of the wall clock, which may jump. It can only keep more: the newest stay
whatever it says.
"""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lora_moe_rl.config.checkpoint import CheckpointConfig
from lora_moe_rl.files.checkpoint import MANIFEST, step_of
from lora_moe_rl.telemetry.metric_table import largest_is_best

HOUR = 3600.0


class Retention:
    """`metrics_file`: the run's metrics.jsonl. `say` gets warnings."""

    def __init__(self, config: CheckpointConfig, metrics_file: Path, say: Callable[[str], None]):
        self.config, self.say = config, say
        self._metrics = Metric(metrics_file, config.best_metric)

    def __call__(self, paths: Sequence[Path]) -> dict[Path, str]:
        """{checkpoint that stays: why}, of those that there are."""
        if self.config.best_metric is not None and not self.values:
            self._say_unknown()
        return self._young(paths) | self._best(paths)

    @property
    def values(self) -> Mapping[int, float]:
        """{step: value} of the best metric so far."""
        return self._metrics.read()

    def _young(self, paths: Sequence[Path]) -> dict[Path, str]:
        hours = self.config.keep_hours
        if hours is None:
            return {}
        return {path: f"younger than {hours:g} h" for path in paths if _age(path) < hours * HOUR}

    def _best(self, paths: Sequence[Path]) -> dict[Path, str]:
        if not self.config.keep_best:
            return {}
        values, name = self.values, self.config.best_metric
        of_step = {step_of(path): path for path in paths}
        # An evaluation is of the adapter of its step, and of no other.
        window = 1 if self.config.best_of_evaluations else max(1, self.config.every)
        means = {step: mean_up_to(values, step, window) for step in of_step}
        best = best_of(means, self.config.keep_best, largest_is_best(self.config))
        return {of_step[step]: f"best: {name} {means[step]:.6g}" for step in best}

    def _say_unknown(self) -> None:
        near = difflib.get_close_matches(str(self.config.best_metric), self._metrics.names, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        self.say(
            f"checkpoint.best_metric={self.config.best_metric} is in no line of "
            f"{self._metrics.path}{hint}: nothing is judged by it"
        )


class Metric:
    """Values of one metric, read from a growing metrics.jsonl once."""

    def __init__(self, path: Path, name: str | None):
        self.path, self.name = path, name
        self.names: set[str] = set()  # of all metrics so far
        self._values: dict[int, float] = {}
        self._read = 0  # bytes

    def read(self) -> Mapping[int, float]:
        """{step: value} so far; a step whose value was NaN has none."""
        if not self.path.exists():
            return self._values
        with open(self.path, "rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # is being written
                self._read += len(line)
                record = json.loads(line)
                self.names |= record.keys()
                value = record.get(self.name)
                if isinstance(value, int | float):
                    self._values[record["step"]] = float(value)
        return self._values


def mean_up_to(values: Mapping[int, float], step: int, window: int) -> float:
    """The mean over the last `window` steps up to `step`; NaN when none of them has a value."""
    found = [values[one] for one in range(step - window + 1, step + 1) if one in values]
    return sum(found) / len(found) if found else math.nan


def best_of(values: Mapping[int, float], count: int, largest: bool) -> list[int]:
    """The `count` steps with the best values, the best first; of equal ones the newer. A step
    without a value is none of them."""
    sign = -1 if largest else 1
    known = [step for step, value in values.items() if not math.isnan(value)]
    return sorted(known, key=lambda step: (sign * values[step], -step))[:count]


def _age(path: Path) -> float:
    """Seconds since it was written; what has no manifest is older than anything."""
    try:
        return time.time() - (path / MANIFEST).stat().st_mtime
    except OSError:
        return math.inf
