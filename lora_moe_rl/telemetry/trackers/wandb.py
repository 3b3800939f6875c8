"""Weights & Biases. A resumed run goes on in the same wandb run."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.details import Details
from lora_moe_rl.telemetry.trackers.base import ProjectConfig, Tracker


class Wandb(Tracker):
    """Samples become a table a step, distributions histograms, adapters artifacts with the version
    and an alias for each checkpoint."""

    class Settings(ProjectConfig):
        mode: Literal["online", "offline"] = Field("online", description="wandb mode.")

    packages = ("wandb==0.29.0",)

    def __init__(self, settings: Settings, config: RunConfig, run_dir: Path):
        try:
            import wandb
            from wandb.errors import Error as WandbError
        except ImportError as error:
            raise self.missing(error) from error
        self.wandb, self.settings = wandb, settings
        try:
            self.run = wandb.init(
                project=settings.project,
                name=settings.run or run_dir.name,
                id=_run_id(run_dir),
                resume="allow" if settings.mode == "online" else None,
                mode=settings.mode,
                dir=run_dir,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(console="off", silent=True),
            )
        except WandbError as error:
            raise ConfigError(
                f"wandb cannot start: {str(error).rstrip('.')}. Log in with `wandb login`, or keep "
                "the run local with tracker.mode=offline"
            ) from error

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        self.run.log(metrics, step=step)

    def details(self, step: int, details: Details) -> None:
        shown: dict[str, Any] = {
            name: self.wandb.Histogram(values) for name, values in details.histograms.items()
        }
        if details.samples:
            columns, rows = details.table()
            shown["samples"] = self.wandb.Table(columns=columns, data=rows, allow_mixed_types=True)
        self.run.log(shown, step=step)

    def adapter(self, step: int, directory: Path) -> None:
        if not self.settings.adapters:
            return
        artifact = self.wandb.Artifact(
            f"adapter-{self.run.id}", type="adapter", metadata={"step": step}
        )
        artifact.add_dir(str(directory))
        self.run.log_artifact(artifact, aliases=["latest", f"step-{step:06d}"])

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def _run_id(run_dir: Path) -> str:
    path = run_dir / ".wandb-id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
