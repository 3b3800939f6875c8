"""The section `checkpoint`: how often, which stay, and where copies go."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, model_validator

from lora_moe_rl.config.evaluation import EVAL
from lora_moe_rl.config.section import LONGEST_WAIT_S, Section


class CheckpointConfig(Section):
    every: int = Field(10, ge=0, description="Steps between checkpoints; 0: only the last step's.")
    keep: int = Field(2, ge=2, description="Newest checkpoints kept.")
    keep_hours: float | None = Field(
        None,
        gt=0,
        description="Also keep those younger than this; null: none for its age.",
    )
    keep_best: int = Field(
        0, ge=0, description="Also keep so many of the best by checkpoint.best_metric."
    )
    best_metric: str | None = Field(
        None,
        description="A metric of metrics.jsonl: of evaluations (eval/) that of the checkpoint's "
        "step, of any other, such as reward/mean, its mean over the checkpoint.every steps up to "
        "it.",
    )
    best_is: Literal["largest", "smallest"] | None = Field(
        None,
        description="Which value of checkpoint.best_metric is the best; null: as docs/metrics.md "
        "has it.",
    )
    stop_after: int = Field(
        0,
        ge=0,
        description="End the run, with a checkpoint, once checkpoint.best_metric got no better in "
        "so many looks in a row: evaluations for a metric of eval/, checkpoints for any other; 0: "
        "never.",
    )
    push_to: str | None = Field(
        None,
        description="A directory, or a URL of storage (s3://BUCKET/PATH), that checkpoints and "
        "adapters are copied to in the background; null: nowhere.",
    )
    push_retries: int = Field(5, ge=0, description="More tries of a copy that failed.")
    push_timeout_s: float = Field(
        1800.0,
        gt=0,
        le=LONGEST_WAIT_S,
        description="Seconds that a copy may take with all its tries.",
    )

    @model_validator(mode="after")
    def _best(self):
        if self.keep_best and self.best_metric is None:
            raise ValueError(
                f"checkpoint.keep_best={self.keep_best} needs a metric to judge by: set "
                "checkpoint.best_metric, reward/mean for one"
            )
        if self.stop_after and self.best_metric is None:
            raise ValueError(
                f"checkpoint.stop_after={self.stop_after} needs a metric to judge by: set "
                "checkpoint.best_metric, reward/mean for one"
            )
        for key in ("keep_best", "keep_hours"):
            if (value := getattr(self, key)) and not self.every:
                raise ValueError(
                    f"checkpoint.{key}={value:g} chooses among checkpoints, and checkpoint.every=0 "
                    "makes one at the end alone: set it above 0"
                )
        if self.stop_after and not self.every and not self.best_of_evaluations:
            raise ValueError(
                f"checkpoint.stop_after={self.stop_after} looks at {self.best_metric} at every "
                "checkpoint, and checkpoint.every=0 makes one at the end alone: set it above 0"
            )
        return self

    @property
    def best_of_evaluations(self) -> bool:
        """Whether the best metric is one that evaluations log."""
        return (self.best_metric or "").startswith(EVAL)

    def absolute(self) -> dict[str, str]:
        """The settings that depend on the current directory, so that they no longer do."""
        if self.push_to is None or "://" in self.push_to:
            return {}
        return {"push_to": os.path.abspath(os.path.expanduser(self.push_to))}
