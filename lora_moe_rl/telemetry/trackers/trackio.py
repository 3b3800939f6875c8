"""Trackio: a local data base (TRACKIO_DIR), or what TRACKIO_SPACE_ID names; `trackio show`. A
resumed run goes on in the same run."""

from __future__ import annotations

import contextlib
import io
import secrets
from importlib import import_module
from pathlib import Path
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.details import Details
from lora_moe_rl.telemetry.trackers.base import ProjectConfig, ProjectTracker


class Trackio(ProjectTracker):
    """Samples become a table a step, distributions histograms, adapters artifacts."""

    class Settings(ProjectConfig):
        pass

    packages = ("trackio==0.43.0",)
    modules = ("trackio",)

    def __init__(self, settings: Settings, config: RunConfig, run_dir: Path):
        try:
            trackio = import_module("trackio")
        except ImportError as error:
            raise self.missing(error) from error
        self.trackio, self.settings = trackio, settings
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # where to look is in docs/trackers.md
                self.run = trackio.init(
                    project=settings.project,
                    name=_name(run_dir, settings.run or run_dir.name),
                    config=config.model_dump(mode="json"),
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except (ValueError, OSError) as error:
            raise ConfigError(f"trackio cannot start: {error}") from error

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        self.run.log(metrics, step=step)

    def details(self, step: int, details: Details) -> None:
        shown: dict[str, Any] = {
            name: self.trackio.Histogram(values.tolist())
            for name, values in details.histograms.items()
        }
        if details.samples:
            columns, rows = details.table()
            shown["samples"] = self.trackio.Table(columns=columns, data=rows)
        self.run.log(shown, step=step)

    def adapter(self, step: int, directory: Path) -> None:
        name = f"adapter-{self.run.name}"
        self.run.log_artifact(directory, name=name, type="adapter", aliases=[f"step-{step:06d}"])

    def close(self, failed: bool) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self.run.finish()
        self.run.finish = _nothing  # Trackio asks for it again at the process's end, and prints


def _nothing() -> None:
    pass


def _name(run_dir: Path, name: str) -> str:
    """The run's name, by which Trackio finds it again: run directories of the same name are two."""
    path = run_dir / ".trackio-name"
    if not path.exists():
        path.write_text(f"{name}-{secrets.token_hex(3)}")
    return path.read_text().strip()
