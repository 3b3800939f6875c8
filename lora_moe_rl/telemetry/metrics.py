"""Metrics of a run: always a line of metrics.jsonl a step, and wandb when it is enabled."""

from __future__ import annotations

import secrets
from types import TracebackType
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.errors import ConfigError
from lora_moe_rl.files.run_dir import RunDir, read_jsonl, to_json


class MetricsWriter:
    """Writes one record a step: a dict with "step" and numbers."""

    def __init__(self, run_dir: RunDir, config: RunConfig):
        self.run_dir, self.config = run_dir, config
        self._wandb: Any = None

    def __enter__(self) -> MetricsWriter:
        # Line buffered: a step that is done is on record, whatever happens next.
        self._file = open(self.run_dir.metrics_file, "a", buffering=1)
        if self.config.logging.wandb.enabled:
            self._wandb = _start_wandb(self.run_dir, self.config)
        return self

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(to_json(record) + "\n")
        if self._wandb is not None:
            self._wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error is None else 1)


def read_metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    """The records so far, one a step; what was NaN is None."""
    return list(read_jsonl(run_dir.metrics_file))


def _start_wandb(run_dir: RunDir, config: RunConfig) -> Any:
    try:
        import wandb
        from wandb.errors import Error as WandbError
    except ImportError as error:
        raise ConfigError(
            "logging.wandb.enabled=true, but wandb is not installed: pip install wandb"
        ) from error
    options = config.logging.wandb
    name = options.name or run_dir.path.name
    try:
        return wandb.init(
            project=options.project,
            name=name,
            # A resumed run goes on in the same wandb run.
            id=_wandb_id(run_dir),
            resume="allow" if options.mode == "online" else None,
            mode=options.mode,
            dir=run_dir.path,
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
    except WandbError as error:
        raise ConfigError(
            f"wandb cannot start: {str(error).rstrip('.')}. Log in with `wandb login`, or keep the "
            f"run local with logging.wandb.mode=offline"
        ) from error


def _wandb_id(run_dir: RunDir) -> str:
    path = run_dir.path / ".wandb-id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()
