"""MLflow: a server, or a data base in the run directory. A resumed run goes on in the same run."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from importlib import import_module
from itertools import batched
from pathlib import Path
from typing import Any

from pydantic import Field

from lora_moe_rl.config import RunConfig
from lora_moe_rl.config.files import to_yaml
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.details import Details
from lora_moe_rl.telemetry.trackers.base import ProjectConfig, ProjectTracker

# What MLflow takes at once, and in a name.
MOST_METRICS, MOST_PARAMS = 1000, 100
_NOT_IN_A_NAME = re.compile(r"[^\w\-. :/]")


class MLflow(ProjectTracker):
    """Settings become params, samples a table, adapters artifacts. There are no histograms in
    MLflow. In names of metrics `_` stands for what it does not take: pass@8 is pass_8."""

    class Settings(ProjectConfig):
        uri: str | None = Field(
            None,
            description="MLflow's tracking URI; null: MLFLOW_TRACKING_URI, or a data base in the "
            "run directory.",
        )

    packages = ("mlflow-skinny==3.17.2", "sqlalchemy==2.1.9", "alembic==1.20.1")
    modules = ("mlflow", "sqlalchemy")

    def __init__(self, settings: Settings, config: RunConfig, run_dir: Path):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # else it tells of its tables
        try:
            import_module("sqlalchemy")  # which mlflow imports only when it opens a data base
            self.entities = import_module("mlflow.entities")
            MlflowException = import_module("mlflow.exceptions").MlflowException
            MlflowClient = import_module("mlflow.tracking").MlflowClient
        except ImportError as error:
            raise self.missing(error) from error
        self.settings = settings
        local = f"sqlite:///{run_dir.absolute()}/mlflow.db"
        uri = settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or local
        try:
            self.client = MlflowClient(uri)
            self.run_id = self._begin(run_dir, run_dir / "mlflow" if uri == local else None)
            self._settings(config)
        except (MlflowException, OSError) as error:
            raise ConfigError(
                f"mlflow cannot start at {uri}: {error}; set tracker.uri, or leave it and "
                "MLFLOW_TRACKING_URI out to keep the run local"
            ) from error

    def _begin(self, run_dir: Path, artifacts: Path | None) -> str:
        """The id of the run, which is made unless it is there. `artifacts`: where those of a local
        run lie."""
        kept = run_dir / ".mlflow-id"
        if kept.exists():
            run_id = kept.read_text().strip()
            self.client.update_run(run_id, status="RUNNING")
            return run_id
        project = self.client.get_experiment_by_name(self.settings.project)
        where = artifacts.absolute().as_uri() if artifacts else None
        experiment = (
            project.experiment_id
            if project
            else self.client.create_experiment(self.settings.project, where)
        )
        name = self.settings.run or run_dir.name
        run_id = self.client.create_run(experiment, run_name=name).info.run_id
        kept.write_text(run_id)
        return run_id

    def _settings(self, config: RunConfig) -> None:
        """The keys as params, of which MLflow lets none change: config.yaml says what holds now."""
        have = self.client.get_run(self.run_id).data.params
        new = [
            self.entities.Param(key, value)
            for key, value in _flat(config.model_dump(mode="json"))
            if key not in have
        ]
        for some in batched(new, MOST_PARAMS):
            self.client.log_batch(self.run_id, params=some)
        self.client.log_text(self.run_id, to_yaml(config), "config.yaml")

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        now = int(time.time() * 1000)
        every = [
            self.entities.Metric(_NOT_IN_A_NAME.sub("_", name), float(value), now, step)
            for name, value in metrics.items()
        ]
        for some in batched(every, MOST_METRICS):
            self.client.log_batch(self.run_id, metrics=some)

    def details(self, step: int, details: Details) -> None:
        if details.samples:
            columns, rows = details.table()
            data = {"step": [step] * len(rows)}
            data |= {name: [row[i] for row in rows] for i, name in enumerate(columns)}
            self.client.log_table(self.run_id, data, f"samples/step-{step:06d}.json")

    def adapter(self, step: int, directory: Path) -> None:
        self.client.log_artifacts(self.run_id, str(directory), f"adapters/step-{step:06d}")

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """(dotted key, value as text) of all settings."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            name = _NOT_IN_A_NAME.sub("_", f"{prefix}{key}")
            yield name, value if isinstance(value, str) else json.dumps(value)
