"""What is left of settings when something else is chosen over them.

A saved config holds every key, and what `algorithm=grpo` has by default looks chosen there: laid
under `algorithm=gspo` as it stands, it would be grpo by another name. So where a later layer
chooses another algorithm, a part of one, an environment or a tracker, the settings below it that
were at the old choice's defaults go, and those that the new one has not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import ValidationError

from lora_moe_rl.config.plugins import KINDS, PARTS
from lora_moe_rl.config.schema import RunConfig
from lora_moe_rl.config.section import Section
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
    chosen = {key: layer[key] for key in choices if key in layer}
    if not chosen or (old := _settings(section, lower)) is None:  # what is laid over may mend it
        return []
    if all(getattr(old, key, one) == one for key, one in chosen.items()):
        return []
    fields, stood_for = type(old).model_fields, old.stood_for()
    at_default = {
        key
        for key in lower.keys() & fields.keys() - {"name"}
        if getattr(old, key) == stood_for.get(key, fields[key].default)
    }
    kept = {key: lower[key] for key in choices if key in lower.keys() - at_default}
    new = _settings(section, kept | chosen)
    gone = set() if new is None else lower.keys() - type(new).model_fields.keys()
    return sorted(at_default | gone)


def _settings(section: str, given: Mapping[str, Any]) -> Section | None:
    """As they are validated; None where they are refused."""
    try:
        return getattr(RunConfig.model_validate({section: dict(given)}), section)
    except (ValidationError, ConfigError):
        return None
