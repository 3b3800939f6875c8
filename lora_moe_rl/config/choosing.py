"""What is left of settings when something else is chosen over them.

A saved config holds every key, and what `algorithm=grpo` has by default looks chosen there: laid
under `algorithm=gspo` as it stands, it would be grpo by another name. So where a later layer
chooses another algorithm, a part of one, an environment or a tracker, the settings below it that
were at the old choice's defaults go.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from lora_moe_rl.config.plugins import KINDS, PARTS
from lora_moe_rl.config.schema import RunConfig
from lora_moe_rl.errors import ConfigError


def chosen_over(
    lower: dict[str, Any], layer: Mapping[str, Any], kept: Collection[tuple[str, str]]
) -> None:
    """Takes from `lower` what goes when `layer` is laid over it. `kept`: (section, key) that stay,
    whatever their values."""
    for section in KINDS:
        mine, chosen = lower.get(section), layer.get(section)
        if isinstance(mine, dict) and isinstance(chosen, Mapping):
            for key in _going(section, mine, chosen):
                if (section, key) not in kept:
                    del mine[key]


def _going(section: str, lower: Mapping[str, Any], layer: Mapping[str, Any]) -> list[str]:
    choices = ("name", *(PARTS if section == "algorithm" else ()))
    try:
        old = getattr(RunConfig.model_validate({section: dict(lower)}), section)
    except (ValidationError, ConfigError):  # whatever is laid over it may mend it
        return []
    if all(layer.get(key, own) == own for key in choices if (own := getattr(old, key, None))):
        return []
    fields, stood_for = type(old).model_fields, old.stood_for()
    return [
        key
        for key in lower.keys() & fields.keys() - {"name"}
        if getattr(old, key) == stood_for.get(key, fields[key].default)
    ]
