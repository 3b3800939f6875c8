"""The run that an adapter is of, and the settings that it was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_moe_rl.config.files import read_config_file
from lora_moe_rl.files.checkpoint import is_named, step_of
from lora_moe_rl.files.run_dir import CONFIG
from lora_moe_rl.files.settings_file import SETTINGS
from lora_moe_rl.files.unchanged import flat


def run_of(source: Path, checkpoint: Path) -> Path | None:
    """The run directory that an adapter is of; None for one that is no run's. `source` is what was
    named to be exported, `checkpoint` what was read: the same, or the newest of a run."""
    if not is_named(checkpoint):
        return None
    folders = (source, checkpoint.absolute().parent.parent)
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def settings_at(run: Path, checkpoint: Path) -> dict[str, Any]:
    """{dotted key: value} of what made the step of `checkpoint`, as the run noted it; of a run
    without a note of it what config.yaml has, the settings of its newest life. Raises ConfigError
    for a config.yaml that cannot be read."""
    noted = SETTINGS.at(run, step_of(checkpoint))
    return flat(read_config_file(run / CONFIG)) if noted is None else noted
