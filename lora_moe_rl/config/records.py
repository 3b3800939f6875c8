"""The `logging` section: what a run leaves behind."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from lora_moe_rl.config.chosen_steps import steps_of
from lora_moe_rl.config.section import Section


class LoggingConfig(Section):
    run_dir: str | None = Field(
        None, description="Where the run writes; null: runs/<recipe>-<model>."
    )
    samples_per_step: int = Field(4, ge=0, description="Samples written to samples.jsonl a step.")
    tokens: bool = Field(
        False,
        description="Write every token of those samples to tokens.jsonl: its id, version, "
        "advantage, weight, logprobs of engine and trainer, and entropy.",
    )
    routes: bool = Field(
        False,
        description="Write with each of these tokens the experts that the engine sent it to, in "
        "every MoE layer: some 4 bytes for each.",
    )
    profile: tuple[int, ...] = Field(
        (),
        description="Steps whose updates torch's profiler traces on every trainer rank, into "
        "traces/ of the run directory: 3-5, or 3,7-9; empty: none.",
    )
    progress: bool = Field(True, description="Show progress bars on a terminal.")

    @field_validator("profile", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> Any:
        return steps_of("logging.profile", value)
