"""Weights & Biases. A resumed run goes on in the same wandb run.

wandb's own step never falls: what is logged to an earlier one is dropped, which a run does that
goes on from a checkpoint before its last step, and an evaluation beside training. The step of a run
is therefore a metric, over which all others are drawn, and wandb counts rows. (Taking steps back,
`resume_from`, is not to be had on every server, and not offline.)

Offline each life of a run is a directory that wandb takes for the whole run: one that is synced
later replaces the history of those with the same id. So a life begins with all metrics before it.
"""

from __future__ import annotations

import math
import secrets
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.jsonl import read_jsonl
from lora_moe_rl.files.run_dir import METRICS
from lora_moe_rl.telemetry.details import Details
from lora_moe_rl.telemetry.trackers.base import ProjectConfig, ProjectTracker

STEP = "step"


class Wandb(ProjectTracker):
    """Samples become a table a step, distributions histograms, adapters artifacts with the version
    and an alias for each checkpoint."""

    class Settings(ProjectConfig):
        mode: Literal["online", "offline"] = Field("online", description="wandb mode.")

    packages = ("wandb==0.29.0",)
    modules = ("wandb",)

    def __init__(self, settings: Settings, config: RunConfig, run_dir: Path):
        try:
            import wandb
            from wandb.errors import Error as WandbError
        except ImportError as error:
            raise self.missing(error) from error
        self.wandb, self.settings, self.online = wandb, settings, settings.mode == "online"
        try:
            self.run = wandb.init(
                project=settings.project,
                name=settings.run or run_dir.name,
                id=_run_id(run_dir),
                resume="allow" if settings.mode == "online" else None,
                mode=settings.mode,
                dir=run_dir,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    finish_timeout=settings.end_timeout_s,
                    finish_timeout_raises=True,
                ),
            )
        except WandbError as error:
            raise ConfigError(
                f"wandb cannot start: {str(error).rstrip('.')}. Log in with `wandb login`, or keep "
                "the run local with tracker.mode=offline"
            ) from error
        self.run.define_metric(STEP, hidden=True)
        self.run.define_metric("*", step_metric=STEP, step_sync=False)
        if settings.mode == "offline":
            self._repeat(run_dir / METRICS)

    def _repeat(self, metrics_file: Path) -> None:
        """What earlier lives of the run have on record, up to where this one goes on."""
        for record in read_jsonl(metrics_file):
            step = record.pop("step")
            self.write(step, {k: math.nan if v is None else v for k, v in record.items()})

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        self.run.log({STEP: step, **metrics})

    def details(self, step: int, details: Details) -> None:
        shown: dict[str, Any] = {
            name: self.wandb.Histogram(values) for name, values in details.histograms.items()
        }
        if details.samples:
            columns, rows = details.table()
            shown["samples"] = self.wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self.run.log({STEP: step, **shown})

    def adapter(self, step: int, directory: Path) -> None:
        artifact = self.wandb.Artifact(
            f"adapter-{self.run.id}", type="adapter", metadata={"step": step}
        )
        for path in sorted(directory.rglob("*")):  # add_dir prints, whatever its settings
            if path.is_file():
                artifact.add_file(str(path), name=path.relative_to(directory).as_posix())
        logged = self.run.log_artifact(artifact, aliases=["latest", f"step-{step:06d}"])
        if self.online:
            logged.wait()  # which raises what went wrong; wandb's own process tells nobody

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def _run_id(run_dir: Path) -> str:
    path = run_dir / ".wandb-id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
