"""settings.json of a run directory: the settings that a run has trained with, since which step.
config.yaml has those of its newest life alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lora_moe_rl.config import RunConfig
from lora_moe_rl.files.since import Since
from lora_moe_rl.files.unchanged import flat_of

SETTINGS = Since("settings.json", "settings")  # {dotted key: value}
SHOWN = 80  # characters of a value


def note(run: Path, step: int, config: RunConfig) -> str:
    """Writes down that the run goes on after `step` with `config`. Returns which settings are
    others than before, '' for none."""
    now = json.loads(json.dumps(flat_of(config), default=str))  # as it will be read
    before = SETTINGS.note(run, step, now)
    if before is None or before == now:
        return ""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    changed = (f"{key} was {_short(before.get(key))}, is {_short(now.get(key))}" for key in keys)
    return f"settings from step {step + 1} on: {'; '.join(changed)} ({SETTINGS.file} has all)"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
