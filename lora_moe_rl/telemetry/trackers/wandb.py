"""Weights & Biases. A resumed run goes on in the same wandb run."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lora_moe_rl.config import RunConfig, TrackerConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.telemetry.trackers.base import Tracker


class Wandb(Tracker):
    class Settings(TrackerConfig):
        project: str = Field("lora_moe_rl", description="wandb project.")
        run: str | None = Field(None, description="wandb run name; null: the run directory's name.")
        mode: Literal["online", "offline"] = Field("online", description="wandb mode.")

    def __init__(self, settings: Settings, config: RunConfig, run_dir: Path):
        try:
            import wandb
            from wandb.errors import Error as WandbError
        except ImportError as error:
            raise ConfigError(
                "tracker.name=wandb, but wandb is not installed: pip install wandb"
            ) from error
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

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


def _run_id(run_dir: Path) -> str:
    path = run_dir / ".wandb-id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
